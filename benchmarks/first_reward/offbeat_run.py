import json
from pathlib import Path

import offbeat


def reward(response, answer):
    return float(answer in response)


rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
offbeat.train(
    model="smollm2",
    task=[{"prompt": row["question"], "answer": row["answer"]} for row in rows],
    reward=reward,
    run={"name": "offbeat", "steps": 3},
    batch={"groups_per_step": 2, "group_size": 4},
    rollout={"max_prompt_tokens": 128, "max_new_tokens": 64},
    eval={"every": 0},
    optimizer={"lr": 1e-5},
)
