// What the drivers of simulated kernels share: arrays that show what was touched, and a request that is read in pieces.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <istream>
#include <string>

#include "cuda_runtime_api.h"

namespace driver {

// An array that starts `shift` bytes after a boundary; what lies before it is there to be found unchanged.  Where only its end is carried
// the rest is mapped, and takes no memory until it is touched.
class Array {
 public:
  Array(int64_t bytes, int64_t carried, int64_t shift) : bytes_(bytes), carried_(carried), shift_(shift) {
    memory_ = static_cast<char*>(
        mapped() ? mmap(nullptr, bytes + shift, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                 : std::malloc(bytes + shift));
    if (memory_ == MAP_FAILED) simt::Fail("no memory to map");
    std::memset(memory_, 0xFF, shift);
    std::memset(end(), 0xFF, carried);
  }
  ~Array() { mapped() ? static_cast<void>(munmap(memory_, bytes_ + shift_)) : std::free(memory_); }
  Array(const Array&) = delete;
  char* data() const { return memory_ + shift_; }
  char* end() const { return data() + bytes_ - carried_; }  // where what is carried starts
  std::string contents() const { return std::string(end(), carried_); }
  bool intact() const {
    return std::all_of(memory_, memory_ + shift_, [](char c) { return c == '\xFF'; });
  }

 private:
  bool mapped() const { return carried_ < bytes_; }

  int64_t bytes_, carried_, shift_;
  char* memory_;
};

template <typename T>
T Read(std::istream& in) {
  T value;
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  if (!in) simt::Fail("the request ends early");
  return value;
}

inline std::string ReadBytes(std::istream& in, int64_t bytes) {
  std::string contents(bytes, '\0');
  in.read(contents.data(), bytes);
  if (!in) simt::Fail("the request ends early");
  return contents;
}

}  // namespace driver
