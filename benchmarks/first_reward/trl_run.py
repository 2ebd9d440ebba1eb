import json
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **columns):
    return [float(right in turns[0]["content"]) for turns, right in zip(completions, answer, strict=True)]


rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
arguments = GRPOConfig(
    output_dir="trl",
    max_steps=3,
    num_generations=4,
    per_device_train_batch_size=8,
    max_completion_length=64,
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
    gradient_checkpointing=False,
)
GRPOTrainer("smollm2", reward, args=arguments, train_dataset=Dataset.from_list(prompts)).train()
