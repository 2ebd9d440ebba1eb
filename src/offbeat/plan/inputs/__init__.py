"""What a plan is made from, as somebody tells it: machines, links and prices, and what is to be trained."""
