// Lets Python check that it fits this library.
#include "c_api.h"
#include "source_digest.h"  // written by cmake/source_digest.cmake

const char* collective_source(void) { return NATIVE_SOURCE_DIGEST; }
