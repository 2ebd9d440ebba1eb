"""Module for SGLang's own process, which cannot import Offbeat: this folder is put on its path instead."""
