"""Lightning's Trainer over two local nodes, and over two processes of one (`make frameworks`)."""

from pathlib import Path

import pytest

import skyward_core as sky

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


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


def test_the_trainer_finds_the_group_of_two_nodes(pool_of_two: sky.ComputePool, tmp_path: Path) -> None:
    zero, one = by_nodes(str(tmp_path)) @ pool_of_two
    assert (zero[:3], one[:3]) == ((0, 2, 8), (1, 2, 8))
    assert zero[3] == pytest.approx(one[3])
