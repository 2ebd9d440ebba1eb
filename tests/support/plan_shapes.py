"""Round machines and models whose costs can be worked out by hand."""

from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.planner.inputs.workload import LengthStatistics, ModelShape, Workload

CARD = Accelerator(
    "card", flops=1e12, memory_bytes=80e9, memory_bytes_per_s=1e12, link_bytes_per_s=1e11, host_bytes_per_s=1e10
)
QWEN_1_5B = ModelShape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, is_tied=True)
QWEN_7B = ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064)
QWEN_14B = ModelShape("qwen2.5-14b", 48, 5120, 40, 8, 128, 13_824, 152_064)
QWEN3_4B = ModelShape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936, is_tied=True)
QWEN3_30B_A3B = ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, num_experts=128, experts_per_token=8)
LENGTHS = {
    "prompt": LengthStatistics(mean=100, mean_square=10_000, tail=100, tail_share=0, longest=100),
    "answer": LengthStatistics(mean=1000, mean_square=2e6, tail=4000, tail_share=0.02, longest=8000),
}


def work(model: ModelShape = QWEN_7B, **changes) -> Workload:
    return Workload(model, **{"groups_per_step": 4, "group_size": 8, **LENGTHS, **changes})


def machines(name: str, num_nodes: int, *, per_node: int = 8, zone: str = "here", card: Accelerator = CARD, **figures):
    return MachineClass(name, Accelerator(**{**vars(card), "name": name, **figures}), per_node, num_nodes, 1.0, zone)


def cluster(*classes: MachineClass, same: float = 5e9, between: float = 1.5e9) -> Inventory:
    names = [one.name for one in classes]
    links = {frozenset((a, b)): Link(same if a == b else between, 0.0) for a in names for b in names}
    return Inventory({one.name: one for one in classes}, links)
