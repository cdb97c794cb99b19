"""Hugging Face's Trainer itself on two local nodes (`make frameworks`)."""

from typing import Any

import pytest

import skyward_core as sky

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


@sky.compute
@sky.distributed.transformers(backend="gloo")
def train(folder: str) -> tuple[int, int, str, int, list[float]]:
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


def test_the_trainer_detects_the_group(pool_of_two: sky.ComputePool, tmp_path: Any) -> None:
    zero, one = train(str(tmp_path)) @ pool_of_two
    assert (zero[:2], one[:2]) == ((0, 2), (1, 2))
    assert zero[2] == one[2] == "ParallelMode.DISTRIBUTED"
    assert (zero[3], one[3]) == (8, 8)
    assert zero[4] == pytest.approx(one[4])
