"""One training on all nodes: PyTorch's DistributedDataParallel, each rank with its own rows.

Run it with `python examples/guides/05_distributed_training.py`. It needs PyTorch in your environment. On other machines
than this one the image installs it there. `torch_ddp.py` beside this folder adds checkpoints and metrics.

Install what it needs with `pip install . torch` in a clone of the repository.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["torch"])
BACKEND = "gloo"  # "nccl" for GPUs


@sky.compute
@sky.distributed.torch(backend=BACKEND)
def train(epochs: int) -> tuple[int, list[float]]:
    """Fit y = x · (1, 2, 3); return how many rows this rank has had, and the weights that all ranks share."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(64, 3)
    rows = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    sampler = sky.DistributedSampler(rows, shuffle=True, seed=0)  # this rank's part of them
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order
        for inputs, targets in DataLoader(rows, batch_size=8, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
    return len(sampler), [round(weight, 1) for weight in model.module.weight[0].tolist()]


def main() -> None:
    """Rent two nodes, train on both, and end them."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        for rank, (rows, weights) in enumerate(train(40) @ pool):
            print(f"rank {rank}: {rows} rows, weights {weights}")


if __name__ == "__main__":
    main()
