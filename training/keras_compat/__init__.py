"""Everything the project takes from inside Keras, in one place.

The step needs three things that Keras does not offer in public: to switch off the
gradient sum inside its optimizers (ours arrive already summed), to see a loss as a
sum and a weight rather than as a mean, and to run a metric without touching its
variables. Checkpoints need a fourth: to write values to Keras' file that the variables
no longer have. Each is a few lines against Keras' own source; each has a test in
``tests/training/test_keras_compat.py`` that fails when Keras changes.
"""

# ruff: noqa: F401 - what the files below offer is used under this package's name
from collective.training.keras_compat.building import (
    build,
    move,
    overrides,
    takes_training,
    tf_variable,
)
from collective.training.keras_compat.layers import (
    InnerScope,
    Node,
    calls_replaced,
    copied,
    layers_in_order,
)
from collective.training.keras_compat.losses import (
    Reduce,
    compiled_loss,
    own_loss,
    reduced_by,
    same_rank,
)
from collective.training.keras_compat.optimizers import (
    apply,
    build_in_parts,
    build_optimizer,
    core_optimizer,
    count_atomically,
    expects_overflow,
    finish,
    loss_scale,
    parts,
    replace_clipping,
    shaped,
    switch_off_gradient_sum,
    update_beside,
)
from collective.training.keras_compat.seeds import (
    SEED_STATE,
    global_seed_state,
    global_seeds,
    is_seed_state,
    make_global_seed_state,
)
from collective.training.keras_compat.stateless_metrics import (
    loss_trackers,
    metric_results,
    metric_sums,
    metrics,
)
from collective.training.keras_compat.weights_file import load_weights, save_weights
