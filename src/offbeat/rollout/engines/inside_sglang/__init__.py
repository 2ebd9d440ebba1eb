"""What runs within SGLang's own process, in its environment: nothing of Offbeat can be imported there, and this folder
is put on its path instead. See `offbeat_in_sglang`."""
