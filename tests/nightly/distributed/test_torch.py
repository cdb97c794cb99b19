"""PyTorch, Lightning and Transformers themselves with gloo on two local nodes (`make frameworks`)."""

import itertools
import os
import types
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.page_blocks import run_in_a_process
from tests.system.test_seed_blocks import on_this_machine
from tests.unit.test_seed_blocks import WITH_TORCH, run, skyward  # noqa: F401 - fixtures

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


@sky.compute
@sky.distributed.torch(backend="gloo")
def summed() -> tuple[int, int, float, str, str]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.environ["RANK"], os.environ["MASTER_PORT"]


def test_each_training_has_a_process_group_of_its_own(pool_of_two: sky.ComputePool) -> None:
    ports = set[str]()
    for _ in range(2):
        zero, one = summed() @ pool_of_two
        assert (zero[:4], one[:4]) == ((0, 2, 3.0, "0"), (1, 2, 3.0, "1"))
        assert zero[4] == one[4]
        ports.add(zero[4])
    assert len(ports) == 2
    assert (summed() >> pool_of_two)[:3] == (0, 1, 1.0)


@sky.compute
def names_of_groups() -> list[str]:
    """Return the name of the first group of four trainings, of which two cannot initialise a group."""
    import contextlib

    import torch.distributed as dist

    def name() -> str:
        return dist.new_group([0]).group_name

    def initialises_another() -> None:
        dist.destroy_process_group()
        dist.init_process_group("nope")

    trained = sky.distributed.torch(backend="gloo")
    names = [trained(name)()]
    for failing in (sky.distributed.torch(backend="nope")(name), trained(initialises_another)):
        with contextlib.suppress(AssertionError):
            names.append(str(failing()))
        names.append(trained(name)())
    return names


def test_a_group_that_cannot_be_initialised_leaves_nothing_in_its_process(pool_of_two: sky.ComputePool) -> None:
    """PyTorch counts the groups of a process, and ranks find each other by that number. The process of the rank that
    fails first is used again: with another number than the other ranks it would wait for them forever.
    """
    first, second, third = names_of_groups() >> pool_of_two
    assert first == second == third


@sky.compute
@sky.distributed.torch(backend="gloo")
def fails(rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has failed")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_the_first_rank_is_raised(pool_of_two: sky.ComputePool, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} has failed"):
        fails(rank) @ pool_of_two
    assert [one[2] for one in summed() @ pool_of_two] == [3.0, 3.0]


def gradients(x: Any, y: Any, model: Any) -> list[float]:
    import torch

    torch.nn.functional.mse_loss(model(x), y).backward()
    return [value for parameter in model.parameters() for value in parameter.grad.flatten().tolist()]


def data() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(64, 3), torch.randn(64, 1), torch.nn.Linear(3, 1)


@sky.compute
@sky.distributed.torch(backend="gloo")
def averaged() -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    x, y, model = data()
    return gradients(*sky.shard(x, y), DistributedDataParallel(model))


def test_gradients_are_averaged_as_one_process_computes_them(pool_of_two: sky.ComputePool) -> None:
    expected = gradients(*data())
    for found in averaged() @ pool_of_two:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@sky.compute
@sky.distributed.torch(backend="gloo", nproc_per_node=2)
def averaged_by_four() -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    x, y, model = data()
    return gradients(*sky.shard(x, y), DistributedDataParallel(model))


@sky.compute
@sky.distributed.torch(backend="gloo", nproc_per_node=2)
def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in TORCHRUN}


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS")


def test_two_processes_a_node_are_four_ranks(pool_of_two: sky.ComputePool) -> None:
    expected = gradients(*data())
    for found in [one for node in averaged_by_four() @ pool_of_two for one in node]:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    found = [[one[name] for name in TORCHRUN] for node in variables() @ pool_of_two for one in node]
    assert found == [[str(rank), str(rank % 2), "4", "2", str(rank // 2), "2", "1"] for rank in range(4)]


@sky.compute
@sky.distributed.torch(backend="gloo")
def sampled() -> list[Any]:
    """Return the arguments with which our sampler and PyTorch's differ."""
    from torch.utils.data import DistributedSampler

    different = []
    for rows, shuffle, drop_last in itertools.product([10, 11], [False, True], [False, True]):
        ours = sky.DistributedSampler(range(rows), shuffle=shuffle, seed=5, drop_last=drop_last)
        theirs = DistributedSampler(range(rows), shuffle=shuffle, seed=5, drop_last=drop_last)
        for epoch in range(2):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            if (list(ours), len(ours)) != (list(theirs), len(theirs)):
                different.append((rows, shuffle, drop_last, epoch))
    return different


def test_the_sampler_has_pytorchs_order(pool_of_two: sky.ComputePool) -> None:
    assert sampled() @ pool_of_two == ([], [])


def test_each_block_of_the_page_runs(tmp_path: Path) -> None:
    run_in_a_process("docs/training.md", tmp_path, {})


class Model:
    def cuda(self) -> "Model":
        return self

    def fit(self, data: list[int]) -> int:
        return sum(data)


@pytest.mark.parametrize("key", WITH_TORCH)
def test_a_block_runs_with_pytorch(key: str, skyward: types.ModuleType) -> None:
    from torch.utils.data import DataLoader

    on_this_machine(skyward)
    steps: list[Any] = []
    names = {"create_model": Model, "my_data": [1, 2, 3], "dataset": [1, 2, 3], "DataLoader": DataLoader}
    found = run(key, **names, epochs=2, train_step=steps.append)
    match key:
        case "003:443":
            assert sorted(found["sampler"]) == [0, 1, 2]
        case "003:462":
            assert sorted(step.item() for step in steps) == [1, 1, 2, 2, 3, 3]
        case _:
            assert found["result"] == 6


def fit(folder: str, nodes: int, devices: int) -> tuple[int, int, int, list[float]]:
    """Train a model of one layer, and return what the Trainer knows of the group, and the weights."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.mse_loss(self.layer(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        num_nodes=nodes,
        devices=devices,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(rows, batch_size=4))
    weights = model.layer.weight.detach().flatten().tolist()
    return trainer.global_rank, trainer.world_size, trainer.global_step, weights


@sky.compute
@sky.distributed.torch(backend="gloo")
def by_nodes(folder: str) -> tuple[int, int, int, list[float]]:
    return fit(folder, nodes=2, devices=1)


def test_lightnings_trainer_finds_the_group_of_two_nodes(pool_of_two: sky.ComputePool, tmp_path: Path) -> None:
    zero, one = by_nodes(str(tmp_path)) @ pool_of_two
    assert (zero[:3], one[:3]) == ((0, 2, 8), (1, 2, 8))
    assert zero[3] == pytest.approx(one[3])


@sky.compute
@sky.distributed.transformers(backend="gloo")
def train_transformers(folder: str) -> tuple[int, int, str, int, list[float]]:
    """Train a tiny model with random weights, and return what the Trainer knows of the group, and its weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    rows: list[dict[str, Any]] = [{"input_ids": torch.tensor([i % 20, 3, 5]), "labels": i % 2} for i in range(16)]
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=rows)
    trainer.train()
    weights = trainer.model.classifier.weight.flatten().tolist()
    return (
        arguments.process_index,
        arguments.world_size,
        str(arguments.parallel_mode),
        trainer.state.global_step,
        weights,
    )


def test_the_trainer_of_transformers_detects_the_group(pool_of_two: sky.ComputePool, tmp_path: Path) -> None:
    zero, one = train_transformers(str(tmp_path)) @ pool_of_two
    assert (zero[:2], one[:2]) == ((0, 2), (1, 2))
    assert zero[2] == one[2] == "ParallelMode.DISTRIBUTED"
    assert (zero[3], one[3]) == (8, 8)
    assert zero[4] == pytest.approx(one[4])
