"""What checks a call, and the checked call: ``request.py``."""
