"""Generates answers of canned lengths by vLLM in process, until it is told to stop: a script for the interpreter of an
environment that has vLLM, and no Offbeat. OFFBEAT_CANNED names the specification, in which are lengths, and the file of
counters; the arguments are those of a worker's vLLM.
"""

import json
import mmap
import os
import random
import struct
import time
from itertools import cycle

GENERATED, TRAINED, STOP = 0, 8, 16
"""Places of the numbers in the file of counters."""
STEPS_AHEAD = 2
LOOK_EVERY_S = 0.0005


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with open(os.environ["OFFBEAT_CANNED"]) as file:
        spec = json.load(file)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
    engine_args = EngineArgs.from_cli_args(parser.parse_known_args()[0])
    engine_args.disable_log_stats = True
    llm = LLM.from_engine_args(engine_args)
    engine, vocabulary = llm.llm_engine, llm.llm_engine.model_config.get_vocab_size()
    with open(spec["counters"], "r+b") as shared:
        counters = mmap.mmap(shared.fileno(), 0)

    def read(place: int) -> int:
        return struct.unpack_from("q", counters, place)[0]

    rng, lengths, number, generated = random.Random(0), cycle(spec["lengths"]), 0, 0
    mean_tokens = sum(length for _, length in spec["lengths"]) / len(spec["lengths"])
    max_ahead = STEPS_AHEAD * mean_tokens * spec["samples_per_step"]
    while not read(STOP):
        if generated - read(TRAINED) > max_ahead:
            time.sleep(LOOK_EVERY_S)
            continue
        for _ in range(spec["num_rows"] - engine.get_num_unfinished_requests()):
            num_prompt, num_tokens = next(lengths)
            prompt = {"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(num_prompt)]}
            params = SamplingParams(
                max_tokens=num_tokens,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), prompt, params)
            number += 1
        for output in engine.step():
            if output.finished:
                generated += len(output.outputs[0].token_ids)
        struct.pack_into("q", counters, GENERATED, generated)


if __name__ == "__main__":
    main()
