"""Generates by vLLM's own `LLM.generate`: a script for the interpreter of an environment that has vLLM, and no Offbeat.

Its arguments are the server's, of which it takes those that speak of the engine. Each line that it reads is a batch as
JSON; to each it answers with a line: seconds, tokens and log-probs. It says `{}` first, once the engine is ready.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is for the log
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
    engine_args = EngineArgs.from_cli_args(parser.parse_known_args()[0])
    engine_args.disable_log_stats = True  # as `LLM` has it unless it is told
    llm = LLM.from_engine_args(engine_args)

    def answer(told: object) -> None:
        print(json.dumps(told), file=answers, flush=True)

    answer({})
    for line in sys.stdin:
        batch = json.loads(line)
        prompts = [{"prompt_token_ids": tokens} for tokens in batch["prompts"]]
        params = [
            SamplingParams(
                max_tokens=batch["num_tokens"],
                temperature=1.0,
                seed=seed,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for seed in batch["seeds"]
        ]
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        completions = [output.outputs[0] for output in outputs]
        answer(
            {
                "seconds": seconds,
                "num_tokens": sum(len(completion.token_ids) for completion in completions),
                "num_logprobs": sum(len(completion.logprobs) for completion in completions),
            }
        )


if __name__ == "__main__":
    main()
