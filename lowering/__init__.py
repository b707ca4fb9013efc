"""What a rewritten node means: the ops in the namespace ``zeco``, and the transfers between ranks under them.

Importing this registers the ops. It makes no process group, stream or thread: the ops do so when they
first run.
"""

from zeco_compile.lowering import attention as attention
from zeco_compile.lowering import carries as carries
from zeco_compile.lowering import checks as checks
from zeco_compile.lowering import complex_recurrence as complex_recurrence
from zeco_compile.lowering import exchange as exchange
from zeco_compile.lowering import final_states as final_states
from zeco_compile.lowering import flips as flips
from zeco_compile.lowering import halo as halo
from zeco_compile.lowering import last_states as last_states
from zeco_compile.lowering import maxima as maxima
from zeco_compile.lowering import snapshots as snapshots
