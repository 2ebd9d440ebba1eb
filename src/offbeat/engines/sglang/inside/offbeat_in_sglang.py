"""Starts SGLang's server with a key and a model name from the environment. On the command line, every user of the
machine could read them."""

import os
import runpy
import sys

if __name__ == "__main__":  # SGLang's child processes import this module too
    sys.argv += ["--api-key", os.environ.pop("OFFBEAT_SERVER_KEY")]
    sys.argv += ["--served-model-name", os.environ.pop("OFFBEAT_SERVER_NAME")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
