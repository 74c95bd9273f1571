"""Where this package is plugged into others'; each is imported by name, when asked
for."""
