"""The parts of `benchmarks.loss_parity`: cases, and what each system makes of them."""
