from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    base_s: float
    per_row_s: float
    per_token_s: float
    prefill_s: float

    def seconds(self, num_steps, num_rows, num_context_tokens, num_prefilled_tokens):
        return (
            self.base_s * num_steps
            + self.per_row_s * num_rows
            + self.per_token_s * num_context_tokens
            + self.prefill_s * num_prefilled_tokens
        )

    def rate(self, rows, mean_context):
        return rows / (self.base_s + rows * (self.per_row_s + self.per_token_s * mean_context))

    def knee(self, share, mean_context):
        return share / (1 - share) * self.base_s / (self.per_row_s + self.per_token_s * mean_context)
