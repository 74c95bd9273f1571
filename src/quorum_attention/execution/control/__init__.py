"""What runs next, and what to do about what happens: pure, without tensors or devices."""
