"""Lightning's Trainer over two nodes: it finds the group by the variables of torchrun.

Run it with `python examples/lightning_trainer.py`. It fits y = 1·a + 2·b + 3·c.

Install what it needs with `pip install . lightning` in a clone of the repository.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["lightning"])
BACKEND, ACCELERATOR = "gloo", "cpu"  # "nccl", "gpu" for GPUs


@sky.compute
@sky.distributed.torch(backend=BACKEND)
def train(epochs: int) -> tuple[int, list[float]]:
    """Return the number of ranks, and the weights."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1, bias=False)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.mse_loss(self.layer(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    x = torch.randn(64, 3)
    rows = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    model = Model()
    trainer = lightning.Trainer(
        accelerator=ACCELERATOR, num_nodes=2, devices=1, strategy="ddp", max_epochs=epochs, **quiet
    )
    trainer.fit(model, DataLoader(rows, batch_size=8))  # each rank gets its share of the rows
    return trainer.world_size, model.layer.weight.detach().flatten().tolist()


def main() -> None:
    """Rent the nodes, train, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        for rank, (ranks, weights) in enumerate(train(20) @ pool):
            print(f"rank {rank} of {ranks}: weights", [round(weight, 2) for weight in weights])


if __name__ == "__main__":
    main()
