// A file descriptor that closes itself.
//
// The rendezvous holds up to kMaxRanks of them and may throw at any point.
#pragma once

#include <unistd.h>

#include <utility>

namespace collective {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

}  // namespace collective
