"""Hugging Face's Trainer over two nodes: it finds the group, and gives each node its share of the rows.

Run it with `python examples/huggingface_trainer.py`. A tiny BERT with random weights learns whether the first token of
a sentence is odd. It downloads nothing.

Install what it needs with `pip install . "transformers[torch]"` in a clone of the repository.
"""

import tempfile

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["transformers[torch]"])
BACKEND = "gloo"  # "nccl" for GPUs, without `use_cpu` below


@sky.compute
@sky.distributed.transformers(backend=BACKEND)
def train(epochs: int) -> tuple[int, float]:
    """Return the number of ranks, and the loss of the trained model."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **size))
    rows = [{"input_ids": torch.tensor([i % 20, 3, 5]), "labels": i % 2} for i in range(80)]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return arguments.world_size, trainer.evaluate()["eval_loss"]


def main() -> None:
    """Rent the nodes, train, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        for rank, (ranks, loss) in enumerate(train(20) @ pool):
            print(f"rank {rank} of {ranks}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
