// Calls a handler of XLA's FFI as XLA does, on a machine that needs no GPU: Python describes the operands, the results and the attributes,
// and is told what the handler answers.  The layout of what XLA passes comes from its own headers, those of the jaxlib that runs the tests;
// what the handler calls back is answered here.  Built by tests/call_frame.py; it must not know any handler.
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->errc, args->message}; }

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;  // CUDA's default stream
  return nullptr;
}

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = CreateError;
    api.XLA_FFI_Error_Destroy = DestroyError;
    api.XLA_FFI_Stream_Get = GetStream;
    return api;
  }();
  return &api;
}

XLA_FFI_CallFrame Frame(XLA_FFI_ExecutionStage stage) {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.stage = stage;
  return frame;
}

// The code of what `handler` answers, and its message, cut to `room` bytes.  An exception that leaves it is an unknown error, as to XLA.
int32_t Call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame, char* message, int64_t room) {
  XLA_FFI_Error* error = nullptr;
  try {
    error = handler(frame);
  } catch (const std::exception& exception) {
    error = new XLA_FFI_Error{XLA_FFI_Error_Code_UNKNOWN, exception.what()};
  }
  if (error == nullptr) return XLA_FFI_Error_Code_OK;
  std::strncpy(message, error->message.c_str(), room - 1);
  const int32_t code = error->code;
  delete error;
  return code;
}

}  // namespace

// What Python fills in, by the same names as in tests/call_frame.py.
extern "C" {

struct Buffer {
  int32_t dtype;  // XLA_FFI_DataType
  int64_t address;
  int64_t rank;
  int64_t* sizes;
};

struct Attribute {
  const char* name;
  int32_t dtype;  // -1: a string
  int64_t size;   // of an array or a string; -1: a scalar
  void* data;
};

int32_t CallHandler(XLA_FFI_Handler* handler, int32_t stage, int64_t operand_count, const Buffer* operands, int64_t result_count,
                    const Buffer* results, int64_t attribute_count, const Attribute* attributes, char* message, int64_t room) {
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(operand_count + result_count);  // so that pointers to them stay
  const auto pointers_to = [&](int64_t count, const Buffer* described) {
    std::vector<void*> pointers;
    for (const Buffer* b = described; b != described + count; ++b) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(b->dtype), reinterpret_cast<void*>(b->address),
                         b->rank, b->sizes});
      pointers.push_back(&buffers.back());
    }
    return pointers;
  };
  std::vector<void*> args = pointers_to(operand_count, operands), rets = pointers_to(result_count, results);
  std::vector<XLA_FFI_ArgType> arg_types(operand_count, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(result_count, XLA_FFI_RetType_BUFFER);

  std::vector<XLA_FFI_ByteSpan> names(attribute_count), strings(attribute_count);
  std::vector<XLA_FFI_ByteSpan*> name_pointers(attribute_count);
  std::vector<XLA_FFI_Scalar> scalars(attribute_count);
  std::vector<XLA_FFI_Array> arrays(attribute_count);
  std::vector<XLA_FFI_AttrType> types(attribute_count);
  std::vector<void*> attrs(attribute_count);
  for (int64_t i = 0; i < attribute_count; ++i) {
    const Attribute& a = attributes[i];
    const auto dtype = static_cast<XLA_FFI_DataType>(a.dtype);
    const bool scalar = a.size < 0;
    names[i] = {a.name, std::strlen(a.name)};
    name_pointers[i] = &names[i];
    scalars[i] = {dtype, a.data};
    arrays[i] = {dtype, scalar ? 0 : static_cast<size_t>(a.size), a.data};
    types[i] = scalar ? XLA_FFI_AttrType_SCALAR : XLA_FFI_AttrType_ARRAY;
    attrs[i] = scalar ? static_cast<void*>(&scalars[i]) : &arrays[i];
    if (a.dtype < 0) {
      strings[i] = {static_cast<const char*>(a.data), static_cast<size_t>(a.size)};
      types[i] = XLA_FFI_AttrType_STRING, attrs[i] = &strings[i];
    }
  }

  XLA_FFI_CallFrame frame = Frame(static_cast<XLA_FFI_ExecutionStage>(stage));
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operand_count, arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, result_count, ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, attribute_count, types.data(), name_pointers.data(), attrs.data()};
  return Call(handler, &frame, message, room);
}

// What XLA asks a handler before it registers it.
int32_t AskMetadata(XLA_FFI_Handler* handler, int32_t* major, int32_t* minor, uint32_t* traits, char* message, int64_t room) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_EXECUTE);
  frame.extension_start = &extension.extension_base;
  const int32_t code = Call(handler, &frame, message, room);
  *major = metadata.api_version.major_version, *minor = metadata.api_version.minor_version, *traits = metadata.traits;
  return code;
}

}  // extern "C"
