"""Checks the names in back-ticks of pages, docstrings, comments and messages.

A file, a class, a member of a class or a module, a function and a command of this repository must exist. What is not
ours, such as a class of Dask, is used somewhere in our code too, or is listed here.
"""

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyward_core.cli.app import command_tree

ROOT = Path(__file__).parents[1]
FOLDERS = ("skyward_core", "integrations", "tests", "benchmarks", "dags", "flows", "examples", "stack", "docs", "data")
UNREAD = ("CHANGELOG.md", "tests/unit/test_names_in_texts.py")
"""The one has the names of its time, the other names what does not exist."""
FILES_OF_OTHERS = """
    first.py definitions.py skyward.schema.json
    acme.py acme_api.py skyward_core/providers/acme.py docs/clouds/acme.md tests/test_x.py vN_title.py
    skyward_core-0.2.0.cdx.json _version.py env.py joblib/_dask.py airflow/provider_info.schema.json
    events/recommendations/rebalance
"""
"""Files of users, of guides, of builds, of other packages; a path of EC2's metadata service."""
NAMES_OF_OTHERS = """
    calls.submitted calls.done calls.failed calls.cancelled compute.map compute.pool machines.sweep_environments
    rows.copy runner.quote other_task.submit Secret.load Client.submit Client.sync Client.scheduler_info

    vN_title UV_INDEX_X_PASSWORD skyward_sweep_schedule verda_token gpuTypeId A100_SXM4_80GBx8 pam_systemd

    KubernetesPodOperator EcsRunTaskOperator cncf.kubernetes container_resources node_selector get_logs awslogs_group
    reattach_on_restart logging_interval on_finish_action active_deadline_seconds on_failure_fail_dagrun
    task_instance_heartbeat_timeout process_executor_events _run_task_and_map_outcome
    PipesK8sClient PipesK8sComponent K8sRunLauncher RayJob RayRunLauncher RayIOManager LocalRay forward_termination
    enable_multi_container_logs add_asset_metadata
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY serialize_context hydrated_context update_artifact update_cache_after_commit
    reconcile_automations _read_server_default_result_storage_block_id
    FutureCancelledError KilledWorker LockExtension ProcessPoolExecutor BrokenProcessPool pre_dispatch _collect
    alembic.ini alembic_version batch_alter_table ScriptDirectory DefaultImpl version_table_impl
    stop_before_delay sleep_using_event stop_when_event_set Fernet.generate_key AssertionRewriter on_broken_pipe add_scheduled_job
    matmul clear_backends _maybe_symbolic_build reduce_per_replica
"""
"""Variables of examples, and names that another class of ours has; names of examples and services; names of Airflow,
Dagster, Prefect, Dask, joblib, Alembic, tenacity and others that our code does not use.
"""

TICKED = re.compile(r"(?<!`)(`+)(?!`)([^\n]+?(?:\n[ \t]*[^\s`][^\n]*?)?)(?<!`)\1(?!`)")
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
OLD_NAMES = re.compile(r"^\| (?:was|then) \|.*(?:\n\|.*)+", re.M)
STRING = re.compile(r'#[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', re.S)
FILE = re.compile(r"([\w.*{},/-]+?)(?:::(\w+)|:(?:\d+-)?(\d+))?")
SUFFIXES = (".py", ".md", ".sh", ".yml", ".toml", ".json", ".txt", ".html")
WRITTEN = re.compile(r"(?<![\w.-])[\w.-]+\.(?:sh|yml|toml|json|txt|html|db)\b")
CLASS = re.compile(r"^( *)class (\w+).*\n(?:(?:\1[ )].*)?\n)*", re.M)
DEFINED = re.compile(
    r"^ *(?:async )?(?:def|class|type) (\w+)|^ *(\w+(?:, \w+)*)(?:: [^=\n]+)?(?: =|$)|(?:self|cls)\.(\w+)(?:: .+)? =",
    re.M,
)
IMPORTED = re.compile(r"^ *(?:from \S+ )?import (\([^)]*\)|.+)", re.M)


class Repository:
    """What exists below a folder, and the texts there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        paths = [path for name in FOLDERS for path in (root / name).rglob("*") if "__pycache__" not in path.parts]
        paths += [path for path in root.iterdir() if path.is_file()]
        self._files = {path.relative_to(root).as_posix() for path in paths if path.is_file()}
        self._ends: dict[str, list[str]] = defaultdict(list)
        """Paths by each of their ends: `ledger/tables.py` and `tables.py` for `skyward_core/ledger/tables.py`."""
        for path in paths:
            parts = path.relative_to(root).parts
            for start in range(len(parts)):
                self._ends["/".join(parts[start:])].append("/".join(parts))
        self._words: set[str] = set()
        """Each word of the code, without comments and docstrings."""
        self._defined: dict[str, set[str]] = {}
        """By file of the product: the names that it defines or imports."""
        self._classes: dict[str, list[str]] = defaultdict(list)
        """Sources of the classes with this name."""
        self._modules: dict[str, list[str]] = defaultdict(list)
        """Files of the product by the last part of the module's or package's name."""
        self.texts = [(file, *text) for file in sorted(self._files.difference(UNREAD)) for text in self._read(file)]

    @cache
    def _source(self, file: str) -> str:
        return (self._root / file).read_text(errors="replace")

    def _read(self, file: str) -> Iterator[tuple[int, str]]:
        """Yield each text of a file with its line. Note the words and definitions of its code."""
        if file.endswith((".png", ".ckpt")):
            return
        code = source = self._source(file)
        if file.endswith(".md"):
            code = " ".join(FENCED.findall(source))
            text = FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), source)
            yield 1, OLD_NAMES.sub(lambda table: re.sub(r"^\|[^|]*", "|", table[0], flags=re.M), text)
        elif file.endswith(".py"):
            code, end = "", 0
            for match in STRING.finditer(source):
                if "`" in match[0]:
                    yield source.count("\n", 0, match.start()) + 1, match[0]
                line = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
                if match[0][0] == "#" or (match[0].startswith('"""') and not line.strip()):
                    code += source[end : match.start()]
                    end = match.end()
            code += source[end:]
            for match in CLASS.finditer(source):
                self._classes[match[2]].append(match[0])
            if file.startswith(("skyward_core/", "integrations/")):
                self._modules[file.removesuffix("/__init__.py").removesuffix(".py").split("/")[-1]].append(file)
                names = [*(name for names in DEFINED.findall(code) for name in names), *IMPORTED.findall(code)]
                self._defined[file] = set(re.findall(r"\w+", " ".join(names)))
        if file != "tests/names_in_texts.py":
            self._words.update(re.findall(r"\w+", code), WRITTEN.findall(code))

    @cache
    def fault(self, name: str) -> str | None:
        """Return what is wrong with a name, "" if it exists, None if nothing here can tell."""
        faults = (rule(name) for rule in (self._file, self._command, self._member, self._word))
        return next((fault for fault in faults if fault is not None), None)

    def _file(self, name: str) -> str | None:
        match = FILE.fullmatch(name)
        if match is None or name.startswith(("/", ".", "~")) or match[1] in FILES_OF_OTHERS.split():
            return None
        path = match[1].strip("/")
        if path in self._words and "." in path:
            return ""  # the product makes it, or reads it: `settings.json`
        first = path.split("/")[0]
        is_ours = "/" in path and (first in FOLDERS or f"{first}/__init__.py" in self._ends)
        if not path.endswith(SUFFIXES) and not is_ours:
            return None
        files = [*self._ends.get(path, ()), *self._ends.get(f"{path}.py", ())]
        if "*" in path or "{" in path:
            pattern = re.compile("|".join(map(translate, alternatives(path))))
            files = [file for end, files in self._ends.items() if pattern.match(end) for file in files]
        if not files:
            is_placeholder = re.search(r"\b[A-Z]+\b", path) and not path.endswith(".md")
            return None if is_placeholder else "no such file"
        if match[2] and not any(re.search(rf"(?:def|class) {match[2]}\b", self._source(file)) for file in files):
            return f"no {match[2]} in this file"
        is_long_enough = not match[3] or any(self._source(file).count("\n") >= int(match[3]) for file in files)
        return "" if is_long_enough else "no such line"

    def _command(self, name: str) -> str | None:
        first, *words = name.split()
        if first == "make" and words:
            targets = re.match(r"(?:[a-z][a-z-]* ?)*", " ".join(words))
            named = targets[0].split() if targets else []
            missing = [word for word in named if not re.search(rf"^{word}:", self._source("Makefile"), re.M)]
            return f"no target {missing[0]}" if missing else ""
        if first == "skyward" and words:
            return fault_of_command(words)
        if module := re.search(r"python3? -m ((?:tests|benchmarks|skyward_core)[\w.]*)", name):
            file = module[1].replace(".", "/")
            return "" if {f"{file}.py", f"{file}/__main__.py"} & self._files else "no such program"
        paths = [word for word in re.split(r"[\s=]", name) if word.split("/")[0] in FOLDERS] if words else []
        return next(filter(None, map(self._file, paths)), "") if paths else None

    def _member(self, name: str) -> str | None:
        match = re.fullmatch(r"(?:skyward_core\.(?=\w+\.))?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?", name)
        if match is None or match[1] in NAMES_OF_OTHERS.split():
            return None
        pairs = pairwise(re.sub(r"^sky\.", "skyward_core.", match[1]).split("."))
        faults = [self._fault_of_pair(*pair) for pair in pairs]
        return None if faults[0] is None else next(filter(None, faults), "")

    def _fault_of_pair(self, owner: str, member: str) -> str | None:
        if owner in self._classes:
            return "" if self._has_member(owner, member) else f"no {member} in {owner}"
        if owner not in self._modules or owner in sys.stdlib_module_names | {"distributed"}:
            return None
        for file in self._modules[owner]:
            below = file.removesuffix("__init__.py")
            if {f"{below}{member}.py", f"{below}{member}/__init__.py"} & self._files:
                return ""
            # of a package all files, because a variable often has its name: `pool.map`
            files = [file] if owner == "skyward_core" else [other for other in self._defined if other.startswith(below)]
            if any(member in self._defined[other] for other in files):
                return ""
        return f"no {member} in {owner}"

    @cache
    def _has_member(self, name: str, member: str) -> bool:
        return any(
            member in names or any(self._inherits(base, member) for base in bases)
            for names, bases in map(members_and_bases, self._classes[name])
        )

    def _inherits(self, base: str, member: str) -> bool:
        """Whether a base class may have it. Of those of other packages nothing is known."""
        name = base.partition("[")[0].split(".")[-1]
        if name in self._classes:
            return self._has_member(name, member)
        if name in {"Protocol", "Generic", "ABC", "BaseModel"}:
            return name == "BaseModel" and member.startswith("model_")
        return hasattr(getattr(builtins, name), member) if hasattr(builtins, name) else True

    def _word(self, name: str) -> str | None:
        """A name of two words, or with dots: each part occurs in code."""
        match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?", name)
        if match is None or not re.search(r"_[A-Za-z]|\.|[a-z][A-Z]|^[A-Z][a-z]", name):
            return None
        parts, others = match[1].split("."), NAMES_OF_OTHERS.split()
        if match[1] in others or name in FILES_OF_OTHERS or (len(parts) > 1 and parts[0] in sys.stdlib_module_names):
            return None
        missing = [part for part in parts if part not in self._words and part not in others]
        return f"nothing is called {missing[0]}" if missing else ""


@cache
def members_and_bases(source: str) -> tuple[set[str], list[str]]:
    """Return what a class defines or its methods use of `self`, and its base classes."""
    node = ast.parse(re.sub(r"^ +(?=class)", "", source)).body[0]
    assert isinstance(node, ast.ClassDef)
    names = set(re.findall(r"\b(?:self|cls)\.(\w+)", source))
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        names.update(target.id for target in targets if isinstance(target, ast.Name))
        names.add(getattr(part, "name", ""))
    return names, [ast.unparse(base) for base in node.bases]


def alternatives(path: str) -> list[str]:
    """Return what a shell makes of `{a,b}`. `{a}` is a part that is not known."""
    match = re.search(r"\{([^}]*)\}", path)
    parts = match[1].split(",") if match and "," in match[1] else "*"
    return [each for part in parts for each in alternatives(path.replace(match[0], part, 1))] if match else [path]


def fault_of_command(words: list[str]) -> str:
    """Return what is wrong with a command line of `skyward`, "" if nothing is."""
    command: Any = command_tree()
    options: dict[str, Any] = {}
    is_value = False
    for word in words:
        options |= {name: option for option in command.params for name in [*option.opts, *option.secondary_opts]}
        if is_value or not re.fullmatch(r"(--)?[a-z][a-z-]*", word):
            is_value = False
        elif word.startswith("--"):
            if word not in {*options, "--help"}:
                return f"no option {word}"
            is_value = word in options and not options[word].is_flag
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"no command {word}"
            command = command.commands[word]
    return ""


def findings(root: Path = ROOT) -> tuple[int, list[str]]:
    """Return how many names were checked, and those that do not exist."""
    repository = Repository(root)
    checked = 0
    missing: list[str] = []
    for file, line, text in repository.texts:
        for match in TICKED.finditer(text):
            name = " ".join(match[2].split())
            fault = repository.fault(name)
            checked += fault is not None
            if fault:
                missing.append(f"{file}:{line + text.count('\n', 0, match.start())}: `{name}`: {fault}")
    return checked, missing
