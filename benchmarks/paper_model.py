"""The model of the paper (ZeCO, arXiv 2507.01004), and what the paper says of it."""

# GLA with 1B parameters, as in the paper: 20 layers, d = 2048, 16 heads with K = V = 128
LAYERS, WIDTH, HEADS, KEY, VALUE = 20, 2048, 16, 128, 128
STATE, DECAY = HEADS * KEY * VALUE * 4, HEADS * KEY * 4

# tokens/s/GPU of that model, by tokens per rank; milliseconds by GPUs.
PAPER_ALONE = {16384: 42838}
PAPER_AT_256 = {16384: {"ZeCO": 34400, "LASP-2": 15196}, 32768: {"ZeCO": 40967, "LASP-2": 25402}}
PAPER_SCAN_MS = {8: 0.14, 256: 0.60}
PAPER_OPERATOR_MS = 6.55
