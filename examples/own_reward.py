"""A reward of one's own: a plain or async function of any of response, answer, prompt, info and tokens, by keyword."""


def reward(response: str, answer: str) -> float:
    """1 for the right number, and a little for at least answering with a number."""
    words = response.split()
    if words and words[-1] == answer:
        return 1.0
    return 0.1 if words and words[-1].isdigit() else 0.0
