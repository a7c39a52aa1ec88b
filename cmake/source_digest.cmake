# Writes OUTPUT, a header with a digest of the native core's sources below ROOT.
# collective/library.py computes the same and finds a library built from others.
file(GLOB_RECURSE sources RELATIVE ${ROOT} ${ROOT}/collective/native/*.cc
                                           ${ROOT}/collective/native/*.h)
list(APPEND sources CMakeLists.txt)
list(SORT sources)
set(text "")
foreach(source ${sources})
  file(SHA256 ${ROOT}/${source} digest)
  string(APPEND text "${source} ${digest}\n")
endforeach()
string(SHA256 digest "${text}")
file(WRITE ${OUTPUT} "#define NATIVE_SOURCE_DIGEST \"${digest}\"\n")
