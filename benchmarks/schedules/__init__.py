"""What `async_vs_sequential` compares: schedules at a modelled pace, and what they learn."""
