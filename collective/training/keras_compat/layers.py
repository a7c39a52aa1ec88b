"""Classes of layers that Keras has and does not export."""

from __future__ import annotations

from keras.src.layers.rnn.conv_lstm import ConvLSTMCell as ConvLSTMCell
