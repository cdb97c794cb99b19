from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    name: str
    count: int = 1
    mig: tuple = ()


def parse(x):
    return Accelerator(x)
