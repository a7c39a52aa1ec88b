// Stands for TensorFlow's library when the ops are linked: it leaves its name
// in them, and the real one, which Python has loaded by then, is found by it.
extern "C" {
int collective_tensorflow_stub = 0;
}
