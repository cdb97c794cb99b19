"""Ephemeral accelerator pools: `import skyward_core as sky`.

>>> import skyward_core as sky
>>> @sky.compute
... def double(x: int) -> int:
...     return 2 * x
>>> with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
...     double(21) >> pool
42

Everything public is here and is loaded when it is first used, so that the import itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The one name loaded at once: it is a module's name too, and a later import of that module would put the module in its
# place.
from skyward_core.compute import compute as compute
from skyward_core.concurrency.loading import load as _load

if TYPE_CHECKING:
    from skyward_core import accelerators as accelerators
    from skyward_core import distributed as distributed
    from skyward_core import errors as errors
    from skyward_core import integrations as integrations
    from skyward_core import shown_text as shown_text
    from skyward_core.accelerators import NVIDIA as NVIDIA
    from skyward_core.accelerators import Accelerator as Accelerator
    from skyward_core.accelerators import is_nvidia as is_nvidia
    from skyward_core.accelerators import is_trainium as is_trainium
    from skyward_core.accelerators.alternative import Alternative as Alternative
    from skyward_core.compute import ComputeFunction as ComputeFunction
    from skyward_core.compute import PendingBatch as PendingBatch
    from skyward_core.compute import PendingCompute as PendingCompute
    from skyward_core.compute import PendingItems as PendingItems
    from skyward_core.compute import gather as gather
    from skyward_core.concurrency.item_stream import ItemStream as ItemStream
    from skyward_core.concurrency.threads import LoopThread as LoopThread
    from skyward_core.concurrency.threads import Threads as Threads
    from skyward_core.concurrency.threads import after_the_work as after_the_work
    from skyward_core.concurrency.threads import in_thread as in_thread
    from skyward_core.config.settings import Settings as Settings
    from skyward_core.distributed.checkpoint import Checkpoint as Checkpoint
    from skyward_core.distributed.checkpoint import SavedCheckpoint as SavedCheckpoint
    from skyward_core.distributed.checkpoint import checkpoint as checkpoint
    from skyward_core.distributed.frameworks import DistributedSampler as DistributedSampler
    from skyward_core.doctor import Check as Check
    from skyward_core.engine.futures import CallFuture as CallFuture
    from skyward_core.engine.packing import plain_call as plain_call
    from skyward_core.errors import BadRequest as BadRequest
    from skyward_core.errors import BootstrapFailed as BootstrapFailed
    from skyward_core.errors import BudgetExceeded as BudgetExceeded
    from skyward_core.errors import CallCrashed as CallCrashed
    from skyward_core.errors import CallOutOfMemory as CallOutOfMemory
    from skyward_core.errors import CallTimedOut as CallTimedOut
    from skyward_core.errors import CredentialsError as CredentialsError
    from skyward_core.errors import GiveUp as GiveUp
    from skyward_core.errors import GroupNotFormed as GroupNotFormed
    from skyward_core.errors import HostKeyChanged as HostKeyChanged
    from skyward_core.errors import InstancesLeft as InstancesLeft
    from skyward_core.errors import LeaseLost as LeaseLost
    from skyward_core.errors import LeaseTampered as LeaseTampered
    from skyward_core.errors import LedgerConflict as LedgerConflict
    from skyward_core.errors import LedgerError as LedgerError
    from skyward_core.errors import NoCapacity as NoCapacity
    from skyward_core.errors import NodeLost as NodeLost
    from skyward_core.errors import NotPicklable as NotPicklable
    from skyward_core.errors import NotYetSupported as NotYetSupported
    from skyward_core.errors import OfferGone as OfferGone
    from skyward_core.errors import PoolClosed as PoolClosed
    from skyward_core.errors import PoolStopped as PoolStopped
    from skyward_core.errors import ProviderFailed as ProviderFailed
    from skyward_core.errors import ProvisioningTimeout as ProvisioningTimeout
    from skyward_core.errors import QuotaExceeded as QuotaExceeded
    from skyward_core.errors import RankFailed as RankFailed
    from skyward_core.errors import RateLimited as RateLimited
    from skyward_core.errors import RemoteError as RemoteError
    from skyward_core.errors import ResultNotLoaded as ResultNotLoaded
    from skyward_core.errors import Skip as Skip
    from skyward_core.errors import SkywardError as SkywardError
    from skyward_core.errors import Unreachable as Unreachable
    from skyward_core.events.events import BootstrapCompleted as BootstrapCompleted
    from skyward_core.events.events import BootstrapProgress as BootstrapProgress
    from skyward_core.events.events import BootstrapStarting as BootstrapStarting
    from skyward_core.events.events import BudgetWarning as BudgetWarning
    from skyward_core.events.events import Callback as Callback
    from skyward_core.events.events import CallProgress as CallProgress
    from skyward_core.events.events import CallReported as CallReported
    from skyward_core.events.events import CallRetrying as CallRetrying
    from skyward_core.events.events import CallsWaiting as CallsWaiting
    from skyward_core.events.events import CandidateRefused as CandidateRefused
    from skyward_core.events.events import ClusterRestarting as ClusterRestarting
    from skyward_core.events.events import ContactLost as ContactLost
    from skyward_core.events.events import ContactRegained as ContactRegained
    from skyward_core.events.events import CostFinal as CostFinal
    from skyward_core.events.events import CostUpdate as CostUpdate
    from skyward_core.events.events import Error as Error
    from skyward_core.events.events import InfraCreated as InfraCreated
    from skyward_core.events.events import InfraCreating as InfraCreating
    from skyward_core.events.events import InstanceLaunching as InstanceLaunching
    from skyward_core.events.events import InstanceLost as InstanceLost
    from skyward_core.events.events import InstanceProvisioned as InstanceProvisioned
    from skyward_core.events.events import InstanceStopping as InstanceStopping
    from skyward_core.events.events import InstancesUnconfirmed as InstancesUnconfirmed
    from skyward_core.events.events import LogLine as LogLine
    from skyward_core.events.events import Metrics as Metrics
    from skyward_core.events.events import NodesScaled as NodesScaled
    from skyward_core.events.events import PoolLeft as PoolLeft
    from skyward_core.events.events import PoolReady as PoolReady
    from skyward_core.events.events import PoolStopping as PoolStopping
    from skyward_core.events.events import PreemptionNoticed as PreemptionNoticed
    from skyward_core.events.events import ProviderName as ProviderName
    from skyward_core.events.events import RebalanceRecommended as RebalanceRecommended
    from skyward_core.events.events import SkywardEvent as SkywardEvent
    from skyward_core.events.events import compose as compose
    from skyward_core.events.events import emit as emit
    from skyward_core.events.events import use_callback as use_callback
    from skyward_core.events.narrator import Narrator as Narrator
    from skyward_core.events.traces import Traces as Traces
    from skyward_core.events.utilisation import Series as Series
    from skyward_core.events.utilisation import Utilisation as Utilisation
    from skyward_core.image.image import Image as Image
    from skyward_core.image.volume import S3Volume as S3Volume
    from skyward_core.image.volume import Volume as Volume
    from skyward_core.ledger.rows import CostPart as CostPart
    from skyward_core.machines.instances import Endpoint as Endpoint
    from skyward_core.machines.instances import Instance as Instance
    from skyward_core.machines.instances import InstanceState as InstanceState
    from skyward_core.machines.instances import Lease as Lease
    from skyward_core.machines.instances import Node as Node
    from skyward_core.machines.offers import Offer as Offer
    from skyward_core.machines.offers import Requirements as Requirements
    from skyward_core.machines.signing import check_secret_key as check_secret_key
    from skyward_core.machines.spot import Spot as Spot
    from skyward_core.machines.spot import SpotLike as SpotLike
    from skyward_core.operations import cost_of as cost_of
    from skyward_core.operations import cost_parts as cost_parts
    from skyward_core.operations import offers as offers
    from skyward_core.operations import receipt_of as receipt_of
    from skyward_core.operations import receipts_of as receipts_of
    from skyward_core.operations import release as release
    from skyward_core.operations import sweep as sweep
    from skyward_core.pool.aio import AsyncCalls as AsyncCalls
    from skyward_core.pool.calls import PoolExecutor as PoolExecutor
    from skyward_core.pool.multi_pool import MultiPool as MultiPool
    from skyward_core.pool.pool import ComputePool as ComputePool
    from skyward_core.pool.pool_use import PoolUse as PoolUse
    from skyward_core.pool.pool_use import UseBill as UseBill
    from skyward_core.programs import command_call as command_call
    from skyward_core.programs import script_call as script_call
    from skyward_core.providers.aws import AWS as AWS
    from skyward_core.providers.base import Provider as Provider
    from skyward_core.providers.base import select_instance as select_instance
    from skyward_core.providers.digitalocean import DigitalOcean as DigitalOcean
    from skyward_core.providers.hosts import Hosts as Hosts
    from skyward_core.providers.local import Local as Local
    from skyward_core.providers.runpod import RunPod as RunPod
    from skyward_core.providers.vastai import VastAI as VastAI
    from skyward_core.providers.verda import Verda as Verda
    from skyward_core.provisioning.quote import Plan as Plan
    from skyward_core.provisioning.quote import PlannedTask as PlannedTask
    from skyward_core.provisioning.quote import Quote as Quote
    from skyward_core.secret import Secret as Secret
    from skyward_core.serialization.plain_arguments import PlainObject as PlainObject
    from skyward_core.serialization.plain_arguments import PlainTypes as PlainTypes
    from skyward_core.session.detached_call import CallAttempt as CallAttempt
    from skyward_core.session.detached_call import CallNews as CallNews
    from skyward_core.session.detached_call import DetachedCall as DetachedCall
    from skyward_core.sklearn.pool import JoblibPool as JoblibPool
    from skyward_core.sklearn.pool import ScikitLearnPool as ScikitLearnPool
    from skyward_core.sklearn.pool import joblib_backend as joblib_backend
    from skyward_core.sklearn.pool import sklearn_backend as sklearn_backend
    from skyward_core.spec import PoolKeywords as PoolKeywords
    from skyward_core.spec import PoolSpec as PoolSpec
    from skyward_core.wire.info import InstanceInfo as InstanceInfo
    from skyward_core.wire.info import current_accelerator as current_accelerator
    from skyward_core.wire.info import instance_info as instance_info
    from skyward_core.wire.info import shard as shard
    from skyward_core.wire.messages import report as report
    from skyward_core.wire.shared_values import scatter as scatter
    from skyward_core.work import RunContext as RunContext
    from skyward_core.work import Work as Work
    from skyward_core.work import run_context as run_context
    from skyward_core.work import running_for as running_for
    from skyward_core.worker.preemption_notice import preemption_notice as preemption_notice

__version__: str  # that of the installed distribution, which has it from the git tag

PROVIDERS = ("AWS", "DigitalOcean", "Verda", "VastAI", "RunPod", "Hosts", "Local")
"""The built-in providers. Each is in the module of `providers` that has its name in small letters."""
_HOMES = {
    **{f"providers.{name.lower()}": name for name in PROVIDERS},
    "accelerators": "Accelerator NVIDIA is_nvidia is_trainium",
    "accelerators.alternative": "Alternative",
    "serialization.plain_arguments": "PlainObject PlainTypes",
    "session.detached_call": "CallAttempt CallNews DetachedCall",
    "compute": "ComputeFunction PendingBatch PendingCompute PendingItems gather",
    "concurrency.threads": "LoopThread Threads after_the_work in_thread",
    "concurrency.item_stream": "ItemStream",
    "config.settings": "Settings",
    "errors": (
        "BadRequest BootstrapFailed BudgetExceeded CallCrashed CallOutOfMemory CallTimedOut CredentialsError"
        " GiveUp GroupNotFormed HostKeyChanged InstancesLeft LeaseLost LeaseTampered LedgerConflict"
        " LedgerError NoCapacity NodeLost NotPicklable NotYetSupported OfferGone PoolClosed PoolStopped ProviderFailed"
        " ProvisioningTimeout QuotaExceeded RankFailed RateLimited RemoteError ResultNotLoaded Skip"
        " SkywardError Unreachable"
    ),
    "events.events": (
        "BootstrapCompleted BootstrapProgress BootstrapStarting BudgetWarning CallProgress CallReported"
        " CallRetrying Callback CallsWaiting CandidateRefused ClusterRestarting ContactLost ContactRegained"
        " CostFinal CostUpdate Error InfraCreated InfraCreating InstanceLaunching InstanceLost"
        " InstanceProvisioned InstanceStopping InstancesUnconfirmed LogLine Metrics NodesScaled PoolReady"
        " PoolLeft PoolStopping PreemptionNoticed ProviderName RebalanceRecommended SkywardEvent compose emit"
        " use_callback"
    ),
    "distributed.checkpoint": "Checkpoint SavedCheckpoint checkpoint",
    "distributed.frameworks": "DistributedSampler",
    "doctor": "Check",
    "engine.futures": "CallFuture",
    "engine.packing": "plain_call",
    "operations": "cost_of cost_parts offers receipt_of receipts_of release sweep",
    "image.image": "Image",
    "image.volume": "S3Volume Volume",
    "sklearn.pool": "JoblibPool ScikitLearnPool joblib_backend sklearn_backend",
    "ledger.rows": "CostPart",
    "machines.instances": "Endpoint Instance InstanceState Lease Node",
    "events.narrator": "Narrator",
    "events.traces": "Traces",
    "events.utilisation": "Series Utilisation",
    "machines.offers": "Offer Requirements",
    "pool.aio": "AsyncCalls",
    "pool.calls": "PoolExecutor",
    "pool.multi_pool": "MultiPool",
    "pool.pool": "ComputePool",
    "pool.pool_use": "PoolUse UseBill",
    "programs": "command_call script_call",
    "providers.base": "Provider select_instance",
    "provisioning.quote": "Plan PlannedTask Quote",
    "secret": "Secret",
    "spec": "PoolSpec PoolKeywords",
    "machines.signing": "check_secret_key",
    "machines.spot": "Spot SpotLike",
    "work": "RunContext Work run_context running_for",
    "wire.messages": "report",
    "wire.info": "InstanceInfo current_accelerator instance_info shard",
    "worker.preemption_notice": "preemption_notice",
    "wire.shared_values": "scatter",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = frozenset({"accelerators", "distributed", "errors", "integrations", "shown_text"})

# The names stand once, above.
__all__ = [  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]
    "compute",
    *sorted(_HOME_OF),
    *sorted(_MODULES),
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name in _HOME_OF:
        value = getattr(_load(f"{__name__}.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("skyward-core")
    except PackageNotFoundError:  # a copy of the folder, as nodes have it
        return "0.0.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
