// What the plug-ins of two tasks say to each other: in `transport_options` of RecvTensor and
// RecvBuf, which TensorFlow leaves to the transport and a task without the plug-in does not read.
//
// | message | in | content |
// | --- | --- | --- |
// | Ask | a request | the incarnation of the endpoint to which the receiver has a link |
// | Introduction | the answer to RecvTensor of kIntroductionKey | incarnation and address of the endpoint |
// | Offer | an answer | the number of the offer, type and shape; the answer has no tensor |
//
// Numbers are little-endian, after a name and the version. A message of another version is none.
#ifndef PLEACH_TENSORFLOW_MESSAGES_H_
#define PLEACH_TENSORFLOW_MESSAGES_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/any.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace pleach {

// No key of a rendezvous: a task without the plug-in answers that it is malformed.
constexpr char kIntroductionKey[] = "pleach introduction";

struct Ask {
  uint64_t incarnation = 0;
};

struct Introduction {
  uint64_t incarnation = 0;
  std::string address;
};

struct Offer {
  uint64_t number = 0;
  tensorflow::DataType type = tensorflow::DT_INVALID;
  tensorflow::TensorShape shape;
};

namespace message {

constexpr uint64_t kVersion = 1;
constexpr int kDimensionsMax = 254;

inline void Begin(const char* name, google::protobuf::Any* any, std::string* value) {
  any->set_type_url(std::string("type.googleapis.com/pleach.") + name);
  value->clear();
}

inline void Put(uint64_t number, std::string* value) {
  for (int byte = 0; byte < 8; ++byte) value->push_back(static_cast<char>(number >> (8 * byte)));
}

inline bool Take(absl::string_view* value, uint64_t* number) {
  if (value->size() < 8) return false;
  *number = 0;
  for (int byte = 0; byte < 8; ++byte)
    *number |= static_cast<uint64_t>(static_cast<unsigned char>((*value)[byte])) << (8 * byte);
  value->remove_prefix(8);
  return true;
}

// Whether this is a message of this name and version, whose rest is then in `value`.
inline bool Is(const char* name, const google::protobuf::Any& any, absl::string_view* value) {
  if (any.type_url() != std::string("type.googleapis.com/pleach.") + name) return false;
  *value = absl::string_view(any.value().data(), any.value().size());
  uint64_t version = 0;
  return Take(value, &version) && version == kVersion;
}

}  // namespace message

inline void Write(const Ask& ask, google::protobuf::Any* any) {
  std::string value;
  message::Begin("Ask", any, &value);
  message::Put(message::kVersion, &value);
  message::Put(ask.incarnation, &value);
  any->set_value(value);
}

inline bool Read(const google::protobuf::Any& any, Ask* ask) {
  absl::string_view value;
  return message::Is("Ask", any, &value) && message::Take(&value, &ask->incarnation);
}

inline void Write(const Introduction& introduction, google::protobuf::Any* any) {
  std::string value;
  message::Begin("Introduction", any, &value);
  message::Put(message::kVersion, &value);
  message::Put(introduction.incarnation, &value);
  any->set_value(value + introduction.address);
}

inline bool Read(const google::protobuf::Any& any, Introduction* introduction) {
  absl::string_view value;
  if (!message::Is("Introduction", any, &value)) return false;
  if (!message::Take(&value, &introduction->incarnation)) return false;
  introduction->address = std::string(value);
  return true;
}

inline void Write(const Offer& offer, google::protobuf::Any* any) {
  std::string value;
  message::Begin("Offer", any, &value);
  message::Put(message::kVersion, &value);
  message::Put(offer.number, &value);
  message::Put(static_cast<uint64_t>(offer.type), &value);
  for (int64_t size : offer.shape.dim_sizes()) message::Put(static_cast<uint64_t>(size), &value);
  any->set_value(value);
}

inline bool Read(const google::protobuf::Any& any, Offer* offer) {
  absl::string_view value;
  if (!message::Is("Offer", any, &value)) return false;
  uint64_t type = 0, size = 0;
  if (!message::Take(&value, &offer->number) || !message::Take(&value, &type)) return false;
  if (type > static_cast<uint64_t>(tensorflow::DataType_MAX)) return false;
  offer->type = static_cast<tensorflow::DataType>(type);
  if (!tensorflow::DataTypeCanUseMemcpy(offer->type) || tensorflow::DataTypeSize(offer->type) == 0)
    return false;
  for (int dimensions = 0; message::Take(&value, &size); ++dimensions) {
    if (dimensions >= message::kDimensionsMax) return false;
    if (!offer->shape.AddDimWithStatus(static_cast<int64_t>(size)).ok()) return false;
  }
  return value.empty();
}

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_MESSAGES_H_
