"""The pictures of docs/: what real workers did, drawn as SVG.

``python -m benchmarks.pictures`` draws them all from what was recorded; ``--record`` plays the named scenes anew.
"""
