// Stands for TensorFlow's library when the ops are linked. It leaves its name in
// them; by this name the loader finds the real library, which Python has loaded.
extern "C" {
int collective_tensorflow_stub = 0;
}
