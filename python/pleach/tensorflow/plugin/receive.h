// A tensor's bytes where another process has lent them, as TensorFlow sees them.
#ifndef PLEACH_TENSORFLOW_RECEIVE_H_
#define PLEACH_TENSORFLOW_RECEIVE_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "exchange.h"
#include "messages.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
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
  explicit LentBuffer(Lent lent)
      : TensorBuffer(const_cast<void*>(lent.data())), lent_(std::move(lent)) {}
  size_t size() const override { return lent_.bytes(); }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(lent_.bytes()));
    description->set_allocator_name("pleach: lent");
  }

 private:
  const Lent lent_;
};

// The tensor of an offer over what was received.
inline absl::Status TensorOf(const Offer& offer, Lent lent, tensorflow::Tensor* tensor) {
  const auto elements = static_cast<uint64_t>(offer.shape.num_elements());
  const auto bytes = elements * static_cast<uint64_t>(tensorflow::DataTypeSize(offer.type));
  if (bytes != lent.bytes())
    return absl::DataLossError(absl::StrCat("an offer of ", bytes, " bytes came with ", lent.bytes()));
  ReceivedCounts::Get()->Count(lent);
  auto* buffer = new LentBuffer(std::move(lent));
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
