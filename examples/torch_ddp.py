"""PyTorch's DistributedDataParallel on two nodes, with checkpoints and metrics.

Run it with `python examples/torch_ddp.py [FOLDER]`. With the folder of an earlier run it continues from the last
checkpoint. On other machines the folder must be on a volume: all nodes share it, and it outlives them.

Install what it needs with `pip install . torch` in a clone of the repository.
"""

import sys
import tempfile

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["torch"])
BACKEND = "gloo"  # "nccl" for GPUs


@sky.compute
@sky.distributed.torch(backend=BACKEND)
def train(folder: str, steps: int) -> tuple[int, float]:
    """Fit y = x · (1, 2, 3) on the rows of this rank; return the first step of this run, and the last loss."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    x = torch.randn(64, 3)
    x, y = sky.shard(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = sky.checkpoint(folder)
    begun_at, loss = 0, torch.tensor(0.0)
    if (state := saved.load()) is not None:
        begun_at = state["step"]
        model.load_state_dict(state["model"])
    for step in range(begun_at, steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if sky.instance_info().rank == 0:
            sky.report(step=step, loss=loss.item())
            if (step + 1) % 50 == 0 or sky.preemption_notice() is not None:
                saved.save(step + 1, {"step": step + 1, "model": model.state_dict()})
    return begun_at, loss.item()


def main(folder: str) -> None:
    """Rent the nodes, train, and end the nodes. If a node is lost, the training runs again on other nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE, retries=2) as pool:
        for rank, (begun_at, loss) in enumerate(train(folder, 120) @ pool):
            print(f"rank {rank}: from step {begun_at} to 120, loss {loss:.6f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
