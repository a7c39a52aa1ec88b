#include "algorithms/request_codec.h"

#include <cstring>

namespace collective {
namespace {

class Writer {
 public:
  template <class T>
  Writer& operator()(const T& value) {
    const char* begin = reinterpret_cast<const char*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof(T));
    return *this;
  }
  template <class List>
  void Each(const List& list) {
    (*this)(list.size());
    for (const auto& one : list) (*this)(one);
  }
  std::vector<char> bytes;
};

class Reader {
 public:
  explicit Reader(const std::vector<char>& bytes) : at_(bytes.data()) {}
  template <class T>
  Reader& operator()(T& value) {
    std::memcpy(&value, at_, sizeof(T));
    at_ += sizeof(T);
    return *this;
  }
  template <class List>
  void Each(List& list) {
    size_t size = 0;
    (*this)(size);
    list.resize(size);
    for (auto& one : list) (*this)(one);
  }

 private:
  const char* at_;
};

// The fields in their order, for the writer and the reader.
template <class Visitor, class AnyRequest>
void VisitFields(Visitor& visit, AnyRequest& request) {
  visit(request.kind)(request.op)(request.root)(request.algorithm)(
      request.has_transport)(request.transport);
  visit.Each(request.name);
  visit.Each(request.counts);
}

}  // namespace

std::vector<char> Encode(const Request& request) {
  Writer writer;
  VisitFields(writer, request);
  writer(request.tensors.size());
  for (const Tensor& tensor : request.tensors) {
    writer(tensor.count)(tensor.dtype).Each(tensor.shape);
  }
  return std::move(writer.bytes);
}

Request Decode(const std::vector<char>& bytes) {
  Request request;
  Reader reader(bytes);
  VisitFields(reader, request);
  size_t tensors = 0;
  reader(tensors);
  request.tensors.resize(tensors);
  for (Tensor& tensor : request.tensors) {
    reader(tensor.count)(tensor.dtype).Each(tensor.shape);
  }
  return request;
}

}  // namespace collective
