"""The setting of calls of FlexAttention's function."""

# How many tokens a call has at least that is taken over; the largest number switches
# this off.
LEAST_TOKENS_SETTING = "flex_min_tokens"
