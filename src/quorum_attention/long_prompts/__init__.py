"""Keys and values of long prompts in segments, on the device, in host memory and in
files.

``places`` counts the bytes of each place, ``segments`` keeps one layer's keys and
values, ``attend`` computes attention of few queries over them, ``save`` writes them to
a folder.
"""
