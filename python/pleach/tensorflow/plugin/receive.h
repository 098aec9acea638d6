// A tensor's bytes where another process has lent them, as TensorFlow sees them.
#ifndef PLEACH_TENSORFLOW_RECEIVE_H_
#define PLEACH_TENSORFLOW_RECEIVE_H_

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "exchange.h"
#include "messages.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"

namespace pleach {

// Tensors of at least kLentBytesMin that other tasks have sent, by the way on which they came.
// Relaxed: each is a number for people.
struct ReceivedCounts {
  std::atomic<uint64_t> in_place{0};
  std::atomic<uint64_t> by_fabric{0};
  std::atomic<uint64_t> by_grpc{0};

  static ReceivedCounts* Get() {
    static auto* counts = new ReceivedCounts;
    return counts;
  }
  void Count(const Lent& lent) {
    (lent.is_in_place() ? in_place : by_fabric).fetch_add(1, std::memory_order_relaxed);
  }
  void CountByGrpc() { by_grpc.fetch_add(1, std::memory_order_relaxed); }
};

// Lent memory below a tensor. It is not the tensor's own: a kernel must not write its result there.
class LentBuffer : public tensorflow::TensorBuffer {
 public:
  LentBuffer(Lent lent, std::shared_ptr<std::atomic<size_t>> count)
      : TensorBuffer(const_cast<void*>(lent.data())), lent_(std::move(lent)), count_(std::move(count)) {
    count_->fetch_add(1, std::memory_order_relaxed);
  }
  ~LentBuffer() override { count_->fetch_sub(1, std::memory_order_relaxed); }
  size_t size() const override { return lent_.bytes(); }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(lent_.bytes()));
    description->set_allocator_name("pleach: lent");
  }

 private:
  const Lent lent_;
  const std::shared_ptr<std::atomic<size_t>> count_;
};

// The tensor of an offer over what was received, or a copy where that is aligned as no kernel may
// read it: after a loss of the link bytes come in a message. `count` counts the tensors that keep
// something lent (relaxed: a limit that need not be exact).
inline absl::Status TensorOf(const Offer& offer, Lent lent,
                             const std::shared_ptr<std::atomic<size_t>>& count,
                             tensorflow::Tensor* tensor) {
  const auto elements = static_cast<uint64_t>(offer.shape.num_elements());
  const auto size = static_cast<uint64_t>(tensorflow::DataTypeSize(offer.type));
  if (lent.bytes() % size != 0 || lent.bytes() / size != elements)
    return absl::DataLossError(absl::StrCat("an offer of ", elements, " elements of ", size,
                                            " bytes came with ", lent.bytes(), " bytes"));
  ReceivedCounts::Get()->Count(lent);
  if (reinterpret_cast<uintptr_t>(lent.data()) % tensorflow::Allocator::kAllocatorAlignment != 0) {
    tensorflow::Tensor copy(offer.type, offer.shape);
    if (!copy.IsInitialized())
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", lent.bytes(), " bytes"));
    std::memcpy(copy.data(), lent.data(), lent.bytes());
    *tensor = std::move(copy);
    return absl::OkStatus();
  }
  auto* buffer = new LentBuffer(std::move(lent), count);
  *tensor = tensorflow::Tensor(offer.type, offer.shape, buffer);
  buffer->Unref();
  return absl::OkStatus();
}

// The same failure, with the tensor and the task that it is about.
inline absl::Status Named(const absl::Status& status, absl::string_view key, absl::string_view task) {
  if (status.ok()) return status;
  absl::Status named(status.code(), absl::StrCat("tensor ", key, " from task ", task, ": ",
                                                 status.message()));
  status.ForEachPayload([&named](absl::string_view type, const absl::Cord& payload) {
    named.SetPayload(type, payload);
  });
  return named;
}

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_RECEIVE_H_
