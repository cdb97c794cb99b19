"""TF_CONFIG, and TensorFlow itself on two local nodes (`make frameworks`)."""

import json
import os

import skyward_core as sky
from skyward_core.distributed.group import Group
from skyward_core.distributed.member import Place


def test_tf_config_names_all_workers_and_this_one() -> None:
    """In the form of TensorFlow's guide "Distributed training", with the addresses that the ranks have exchanged."""
    framework = sky.distributed.tensorflow()(print).framework
    group = Group(Place(1, 2, 0, 1, 1, 2, "10.0.0.1", "key"), "10.0.0.2", lambda mine: ["10.0.0.1:4000", mine])
    with framework.running(group):
        config = json.loads(os.environ["TF_CONFIG"])
        first, second = config["cluster"]["worker"]
        assert config["task"] == {"type": "worker", "index": 1}
        assert first == "10.0.0.1:4000"
        assert second.startswith("10.0.0.2:")
        assert os.environ["no_grpc_proxy"] == "10.0.0.1,10.0.0.2"  # noqa: SIM112 - gRPC's own spelling
    group.restore_environment()
    assert "TF_CONFIG" not in os.environ
