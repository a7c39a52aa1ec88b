"""Everything the project takes from inside Keras, in one place.

The step needs three things that Keras has no public function for: to switch off the
gradient sum inside its optimizers (our gradients are summed already), to see a loss as a
sum and a weight instead of a mean, and to run a metric without touching its variables.
Checkpoints need a fourth: to write earlier values of the variables to Keras' file. Each is
a few lines against Keras' source, and each has a test in
``tests/training/keras_compat/test_keras_compat.py`` that fails when Keras changes.
"""

# ruff: noqa: F401 - the functions of the files below are used under this package's name
from collective.training.keras_compat.batch_norm import (
    Moments,
    batch_norm_layers,
    masked_moments,
    replace_moments,
)
from collective.training.keras_compat.building import (
    build,
    call,
    move_variable,
    other_optimizers,
    overrides,
    takes_training,
    tf_variable,
)
from collective.training.keras_compat.compiled import compiled_arguments
from collective.training.keras_compat.data import (
    DataAdapter,
    EpochIterator,
    adapter,
    as_dense_or_sparse,
    class_weights,
    in_metric_order,
    initial_epoch,
    is_array,
    is_validated,
    set_trainable_flags,
    sparse_by_rows,
    sparse_rows,
    trainable_flags,
    unpack,
)
from collective.training.keras_compat.fixed_layers import (
    fixed_randomness,
    moving_statistics,
)
from collective.training.keras_compat.fixed_noise import FixedNoise, fixed_noise
from collective.training.keras_compat.interception import (
    Hooks,
    intercept,
    record_applied,
)
from collective.training.keras_compat.layers import (
    InnerScope,
    Node,
    copy_tensor,
    layers_in_order,
    replace_layer_calls,
)
from collective.training.keras_compat.losses import (
    LossCall,
    Unreduced,
    compiled_loss,
    custom_loss,
    replace_losses,
    same_rank,
    unreduced,
    whole_losses,
)
from collective.training.keras_compat.masks import mask_of, set_mask
from collective.training.keras_compat.optimizers import (
    apply,
    build_for_shards,
    build_optimizer,
    core_optimizer,
    count_atomically,
    expects_overflow,
    finish,
    flatten_partitioned,
    is_overwritten,
    learning_rates,
    loss_scale,
    replace_clipping,
    replace_shapes,
    single_optimizers,
    switch_off_gradient_sum,
    update_on_variable_devices,
)
from collective.training.keras_compat.results import all_results, result_of
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
    metric_variables,
    metrics,
    scalar_means,
)
from collective.training.keras_compat.stock_step import (
    StepOutcome,
    loss_names,
    stock_step,
)
from collective.training.keras_compat.variable_scope import ForwardScope
from collective.training.keras_compat.weights_file import load_weights, save_weights
