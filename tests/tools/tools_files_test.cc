// .npy and .safetensors: round trips, what hostile files are told, and a seeded fuzz of both readers.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "testing/elements.h"
#include "testing/random.h"
#include "tools/array.h"
#include "tools/file.h"
#include "tools/npy.h"
#include "tools/safetensors.h"

namespace polyhead::tools {
using namespace testing;
namespace {

namespace fs = std::filesystem;

class ToolsFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("polyhead_files_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // The error of reading these bytes, without the leading "'path': ".
  std::string npy_error(const std::string& bytes) const {
    const auto array = read_npy(write("a.npy", bytes));
    EXPECT_FALSE(array.ok());
    return array.ok() ? "" : without_path(array.status().message(), "a.npy");
  }
  std::string safetensors_error(const std::string& bytes) const {
    const auto file = SafetensorsFile::open(write("a.safetensors", bytes));
    EXPECT_FALSE(file.ok());
    return file.ok() ? "" : without_path(file.status().message(), "a.safetensors");
  }

  fs::path folder_;

 private:
  std::string without_path(const std::string& message, const std::string& name) const {
    const std::string prefix = "'" + path(name) + "': ";
    EXPECT_EQ(message.substr(0, prefix.size()), prefix);
    return message.substr(std::min(prefix.size(), message.size()));
  }
};

std::string npy(const std::string& header, const std::string& data, char version = 1) {
  std::string bytes = "\x93NUMPY";
  bytes += {version, '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  if (version > 1) bytes += std::string(2, '\0');
  return bytes + header + data;
}

std::string npy_of(const std::string& descr, const std::string& shape, size_t data_bytes) {
  return npy("{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n",
             std::string(data_bytes, '\1'));
}

std::string safetensors(const std::string& json, const std::string& data, int64_t length = -1) {
  uint64_t count = length < 0 ? json.size() : static_cast<uint64_t>(length);
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &count, 8);
  return bytes + json + data;
}

TEST_F(ToolsFiles, EveryDtypeSurvivesBothFormats) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64, DType::kBool, DType::kInt32,
                      DType::kInt64}) {
    alignas(8) char data[24 * 8];
    Tensor tensor(data, dtype, {2, 3, 4});
    double next = 0;
    for_each_element(tensor, [&](void* element) {
      set_element(dtype, element, dtype == DType::kBool ? next != 3 : next - 5), ++next;
    });
    // Written transposed: the file is row-major in the order of the dims all the same.
    std::swap(tensor.dims[0], tensor.dims[2]);
    std::swap(tensor.strides[0], tensor.strides[2]);
    for (const char* name : {"t.npy", "t.safetensors"}) {
      ASSERT_TRUE(write_arrays(path(name), {{"t", tensor}}, true).ok());
      const auto array = read_array(path(name));
      ASSERT_TRUE(array.ok()) << array.status().message();
      EXPECT_EQ(array->tensor.dtype, dtype);
      EXPECT_EQ(dims_text(array->tensor), "[4, 3, 2]");
      std::vector<double> expected, got;
      for_each_element(tensor, [&](void* e) { expected.push_back(element_value(dtype, e)); });
      for_each_element(array->tensor, [&](void* e) { got.push_back(element_value(dtype, e)); });
      EXPECT_EQ(got, expected) << name << " " << dtype_name(dtype);
      EXPECT_EQ(array->is_void16, dtype == DType::kBFloat16 && std::string(name) == "t.npy");
    }
  }
}

TEST_F(ToolsFiles, SeveralTensorsShareASafetensorsFile) {
  const float f[2] = {1, 2};
  const int64_t i[3] = {3, 4, 5};
  const bool b[3] = {true, false, true};
  const NamedTensors tensors = {{"b", Tensor(b, DType::kBool, {3})},
                                {"f", Tensor(f, DType::kFloat32, {1, 2})},
                                {"i", Tensor(i, DType::kInt64, {3})},
                                {"none", Tensor(f, DType::kFloat32, {2, 0})}};
  ASSERT_TRUE(write_arrays(path("m.safetensors"), tensors, false).ok());
  const auto file = SafetensorsFile::open(path("m.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->entries().size(), 4u);
  EXPECT_EQ(static_cast<int64_t*>(read_array(path("m.safetensors") + ":i")->tensor.data)[2], 5);
  EXPECT_NE(read_array(path("m.safetensors")).status().message().find("holds 4 tensors; name one as FILE:NAME"),
            std::string::npos);
  EXPECT_NE(
      read_array(path("m.safetensors") + ":x\x1b[2J").status().message().find("has no tensor 'x\\x1b[2J'; 4 tensors:"),
      std::string::npos);
  EXPECT_NE(write_arrays(path("m.npy"), tensors, false).message().find("can hold one tensor, not 4"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(path("m.npy")));
}

TEST_F(ToolsFiles, FortranOrderIsReadAsStrides) {
  std::string data;
  for (float x : {1.f, 4.f, 2.f, 5.f, 3.f, 6.f}) data.append(reinterpret_cast<const char*>(&x), 4);
  const auto array = read_npy(write("f.npy", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}", data)));
  ASSERT_TRUE(array.ok()) << array.status().message();
  std::vector<double> got;
  for_each_element(array->tensor, [&](void* e) { got.push_back(element_value(DType::kFloat32, e)); });
  EXPECT_EQ(got, (std::vector<double>{1, 2, 3, 4, 5, 6}));
}

TEST_F(ToolsFiles, EveryVersionOfNpyIsRead) {
  const std::string header = "{\"shape\": (2,), 'fortran_order': False, 'descr': '<f4',}   \n";
  for (char version = 1; version <= 3; ++version) {
    EXPECT_TRUE(read_npy(write("v.npy", npy(header, std::string(8, '\0'), version))).ok()) << int{version};
  }
}

TEST_F(ToolsFiles, HostileNpyFilesAreRefusedInWords) {
  const std::string f4 = "{'descr': '<f4', 'fortran_order': False, ";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a .npy file: it does not begin with \\x93NUMPY"},
      {"PK\3\4 zip of arrays", "not a .npy file: it does not begin with \\x93NUMPY"},
      {npy("{}", "", 4), "format version 4.0; 1.0, 2.0 and 3.0 are known"},
      {npy_of("<f4", "(2,)", 8).substr(0, 30), "file ends inside its header"},
      {std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12), "header of 4294967307 bytes, at most 65536 are taken"},
      {npy_of("|O", "(1,)", 8), "descr is 'O': Python objects (pickle) are refused"},
      {npy_of(">f4", "(2,)", 8), "descr '>f4' is big-endian; save it as '<f4'"},
      {npy_of("<c8", "(1,)", 8),
       "descr '<c8' is not taken; float32 '<f4', float64, float16, bfloat16 '<V2', int32, int64 and bool are"},
      {npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "1234"),
       "descr is a list: records with fields are not taken"},
      {npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "1234"),
       "header has 'descr' twice"},
      {npy("{'descr': '<f4', 'shape': (1,)}", "1234"), "header lacks descr, fortran_order or shape"},
      {npy(f4 + "'shape': (1,), 'more': 1}", "1234"), "header has an unknown key 'more'"},
      {npy(f4 + "'shape': (1,)} + exec('')", "1234"), "header: the end of the header expected at '+ exec(\\x27\\x27)'"},
      {npy(f4 + "'shape': (-1,)}", ""), "header: a size >= 0 in the shape expected at '-1,)}'"},
      {npy(f4 + "'shape': (1)}", "1234"), "header: ',' in a shape of one size expected at '}'"},
      {npy(f4 + "'shape': (1, 2", "1234"), "header: ',' or ')' in the shape expected at ''"},
      {npy("{'descr': '<f4", ""), "header: the end of the string expected at '\\x27<f4'"},
      {npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "1234"),
       "header: True or False expected at '0, \\x27shape\\x27: (1,)}'"},
      {npy_of("<f4", "(9223372036854775808,)", 0), "shape has a size beyond 2^63"},
      {npy_of("<f4", "(4611686018427387904, 4)", 0), "shape [4611686018427387904, 4] is too large"},
      {npy_of("<f4", "(0, 4611686018427387904, 4)", 0), "shape [0, 4611686018427387904, 4] is too large"},
      {npy_of("<f4", "(1000000000000,)", 16),
       "shape [1000000000000] of <f4 needs 4000000000000 bytes of data, the file has 16"},
      {npy_of("<f4", "(2,)", 7), "shape [2] of <f4 needs 8 bytes of data, the file has 7"},
      {npy_of("<f4", "(2,)", 9), "shape [2] of <f4 needs 8 bytes of data, the file has 9"},
      {npy_of("<f4", "()", 4), "shape [] has 0 sizes, must have 1 to 5"},
      {npy_of("<f4", "(1,1,1,1,1,1)", 4), "shape [1, 1, 1, 1, 1, 1] has 6 sizes, must have 1 to 5"},
      {npy("{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}", "\1\2"),
       "boolean element 1 is byte 2, must be 0 or 1"}};
  for (const auto& [bytes, sentence] : cases) EXPECT_EQ(npy_error(bytes), sentence);
}

TEST_F(ToolsFiles, HostileSafetensorsFilesAreRefusedInWords) {
  const auto one = [](const std::string& fields) { return safetensors("{\"a\":{" + fields + "}}", "12345678"); };
  const std::string f4 = "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]";
  const std::string b4 = "\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a safetensors file: it has less than 8 bytes"},
      {safetensors("{}", "", INT64_MAX), "header of 9223372036854775807 bytes, at most 100000000 are taken"},
      {std::string(8, '\xff') + "{}", "header of 18446744073709551615 bytes, at most 100000000 are taken"},
      {safetensors("{}", "", 3), "header of 3 bytes in a file of 10"},
      {safetensors("", ""), "header does not begin with '{'"},
      {safetensors(" {}", ""), "header does not begin with '{'"},
      {safetensors("{\"a\":", ""), "header is not JSON: mistake at byte 6"},
      {safetensors("{\"\xff\":1}", ""), "header is not JSON: mistake at byte 3"},
      {safetensors("{}{}", ""), "header is not JSON: mistake at byte 3"},
      {safetensors("{}", "x"), "the file has 1 bytes of data, its tensors 0"},
      {safetensors("{\"a\":[]}", ""), "tensor 'a': an array is not expected here"},
      {safetensors("{\"a\":null}", ""), "tensor 'a': null is not expected"},
      {safetensors("{\"a\":{},\"a\":{}}", ""), "tensor 'a': dtype, shape or data_offsets is missing"},
      {safetensors("{\"a\":{" + f4 + "},\"a\":{" + f4 + "}}", "12345678"), "header names tensor 'a' twice"},
      {safetensors("{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}}", ""), "metadata has 'k' twice"},
      {safetensors("{\"__metadata__\":{\"k\":{}}}", ""), "header: an object is not expected here"},
      {safetensors("{\"__metadata__\":{\"k\":1}}", ""), "header: a number is not expected here"},
      {one(f4 + ",\"dtype\":\"F32\""), "tensor 'a': 'dtype' is given twice"},
      {one(f4 + ",\"x\":1"), "tensor 'a': 'x' is not a known field"},
      {one("\"dtype\":{\"deep\":1}"), "tensor 'a': an object is not expected here"},
      {one("\"shape\":[[2]]"), "tensor 'a': an array is not expected here"},
      {one("\"shape\":[-2]"), "tensor 'a': sizes and offsets must not be negative"},
      {one("\"shape\":[2.0]"), "tensor 'a': sizes and offsets must be integers"},
      {one("\"shape\":[true]"), "tensor 'a': true or false is not expected"},
      {one("\"shape\":[9223372036854775808]"), "tensor 'a': shape has a size beyond 2^63"},
      {one("\"shape\":[99999999999999999999]"), "tensor 'a': sizes and offsets must be integers"},
      {one("\"data_offsets\":[0]"), "tensor 'a': data_offsets must be [begin, end]"},
      {one("\"data_offsets\":[0,8,8]"), "tensor 'a': data_offsets must be [begin, end]"},
      {one("\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,8]"), "tensor 'a': unknown dtype 'F4'"},
      {one(b4 + "[8,4]"), "tensor 'a': data_offsets [8, 4] do not lie in the 8 bytes of data"},
      {one(b4 + "[8,12]"), "tensor 'a': data_offsets [8, 12] do not lie in the 8 bytes of data"},
      {one(b4 + "[0,18446744073709551615]"),
       "tensor 'a': data_offsets [0, 18446744073709551615] do not lie in the 8 bytes of data"},
      {one(b4 + "[0,8]"), "tensor 'a': shape [1] of F32 needs 4 bytes, data_offsets give 8"},
      {one("\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]"),
       "tensor 'a': shape [4611686018427387904, 4] is too large"},
      {one(b4 + "[0,4]"), "the file has 8 bytes of data, its tensors 4"},
      {one(b4 + "[4,8]"), "tensor 'a' begins at byte 4, behind a gap after the tensor before it at 0"},
      {safetensors("{\"a\":{" + b4 + "[0,4]},\"b\":{" + b4 + "[2,6]}}", "12345678"),
       "tensor 'b' begins at byte 2, inside the tensor before it at 4"}};
  for (const auto& [bytes, sentence] : cases) EXPECT_EQ(safetensors_error(bytes), sentence);
}

TEST_F(ToolsFiles, DeepJsonEndsAtOnce) {
  EXPECT_EQ(safetensors_error(safetensors(std::string(1 << 20, '[').replace(0, 5, "{\"a\":"), "")),
            "tensor 'a': an array is not expected here");
}

TEST_F(ToolsFiles, TensorsOfOtherTypesDoNotStandInTheWay) {
  const std::string json =
      "{\"u\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
      "\"f\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}";
  const std::string file = write("u.safetensors", safetensors(json, "12345678"));
  EXPECT_TRUE(read_array(file + ":f").ok());
  EXPECT_NE(read_array(file + ":u").status().message().find("tensor 'u': dtype U8 is not taken here"),
            std::string::npos);
}

TEST_F(ToolsFiles, OnlyRegularFilesAreRead) {
  ASSERT_EQ(mkfifo(path("pipe.npy").c_str(), 0600), 0);
  EXPECT_EQ(read_npy(path("pipe.npy")).status().message(), "'" + path("pipe.npy") + "' is not a regular file");
  fs::create_directory(path("folder.npy"));
  EXPECT_EQ(read_npy(path("folder.npy")).status().message(), "'" + path("folder.npy") + "' is not a regular file");
  EXPECT_EQ(read_npy(path("absent.npy")).status().message(),
            "cannot open '" + path("absent.npy") + "': No such file or directory");
  EXPECT_EQ(read_array(path("a.txt")).status().message(), "'" + path("a.txt") + "' must end in .npy or .safetensors");
}

TEST_F(ToolsFiles, OutputsAppearWholeOrNotAtAll) {
  const float f[2] = {1, 2};
  const NamedTensors tensors = {{"f", Tensor(f, DType::kFloat32, {2})}};
  ASSERT_TRUE(write_arrays(path("o.npy"), tensors, false).ok());
  EXPECT_EQ(write_arrays(path("o.npy"), tensors, false).message(),
            "'" + path("o.npy") + "' exists already; --force replaces it");
  EXPECT_TRUE(write_arrays(path("o.npy"), tensors, true).ok());
  // A link is replaced, what it points to is not touched.
  write("target", "precious");
  fs::create_symlink(path("target"), path("link.npy"));
  EXPECT_FALSE(write_arrays(path("link.npy"), tensors, false).ok());
  EXPECT_TRUE(write_arrays(path("link.npy"), tensors, true).ok());
  EXPECT_EQ(read("target"), "precious");
  EXPECT_FALSE(fs::is_symlink(path("link.npy")));
  fs::create_directory(path("d.npy"));
  EXPECT_NE(write_arrays(path("d.npy"), tensors, true).message().find("is not a regular file and will not be replaced"),
            std::string::npos);
  EXPECT_NE(write_arrays(path("absent/o.npy"), tensors, false).message().find("cannot create"), std::string::npos);
  {
    auto file = OutputFile::create(path("half.npy"), false);
    ASSERT_TRUE(file.ok() && file->write("abc", 3).ok());
  }
  // Somebody else's file that appears while we write is not replaced.
  auto file = OutputFile::create(path("race.npy"), false);
  ASSERT_TRUE(file.ok());
  write("race.npy", "theirs");
  EXPECT_FALSE(file->commit().ok());
  EXPECT_EQ(read("race.npy"), "theirs");
  { const OutputFile dropped = std::move(*file); }
  for (const auto& entry : fs::directory_iterator(folder_)) EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
  EXPECT_FALSE(fs::exists(path("half.npy")));
}

// Bytes like `bytes`, with one to three mutations: bits, bytes, cuts, repeats, other digits, stray punctuation.
std::string mutated(const std::string& bytes, Random& random) {
  std::string out = bytes;
  for (int64_t n = 1 + random.below(3); n > 0 && !out.empty(); --n) {
    const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(out.size())));
    switch (random.below(14)) {
      case 0: out[at] = static_cast<char>(out[at] ^ 1 << random.below(8)); break;
      case 1: out[at] = static_cast<char>(random.bits()); break;
      case 2: out.resize(at); break;
      case 3: out.erase(at, static_cast<size_t>(1 + random.below(8))); break;
      case 4: out.insert(at, out.substr(at, static_cast<size_t>(1 + random.below(16)))); break;
      case 5: out.insert(at, std::to_string(random.bits() >> random.below(64))); break;
      case 6: {
        constexpr std::string_view kPieces[] = {
            "[", "]", "{", "}", "(", ")", "'", "\"", ",", ":", "-", "9999999999999999999", "e9"};
        out.insert(at, kPieces[random.below(std::size(kPieces))]);
        break;
      }
      default:
        if (const size_t digit = out.find_first_of("0123456789", at); digit != std::string::npos) {
          out[digit] = static_cast<char>('0' + random.below(10));
        }
    }
  }
  return out;
}

// Every mutation is read, or refused with a sentence. Both must happen often, or the fuzz tests little.
void fuzz(const std::vector<std::string>& seeds, int64_t rounds, const std::function<Status(const std::string&)>& use) {
  Random random(20240607, 0);
  int64_t num_read = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    const auto seed = static_cast<size_t>(random.below(static_cast<int64_t>(seeds.size())));
    const Status status = use(mutated(seeds[seed], random));
    num_read += status.ok();
    ASSERT_TRUE(status.ok() || !status.message().empty());
  }
  EXPECT_GT(num_read, rounds / 50);
  EXPECT_LT(num_read, rounds - rounds / 50);
}

// Reads every element.
double sum_of(const Tensor& tensor) {
  double sum = 0;
  for_each_element(tensor, [&](void* e) { sum += element_value(tensor.dtype, e); });
  return sum;
}

const std::vector<std::string>& npy_seeds() {
  static const std::vector<std::string> kSeeds = {
      npy_of("<f4", "(2, 3)", 24), npy_of("|b1", "(5,)", 5), npy_of("<V2", "(2, 2, 2, 64)", 1024),
      npy("{'descr': '<i8', 'fortran_order': True, 'shape': (3, 10)}", std::string(240, '\0'), 2)};
  return kSeeds;
}

const std::vector<std::string>& safetensors_headers() {
  static const std::vector<std::string> kSeeds = {
      "{\"__metadata__\":{\"a\":\"b\"},\"q\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]},"
      "\"k\":{\"dtype\":\"BOOL\",\"shape\":[4],\"data_offsets\":[8,12]}}  ",
      "{\"k\":{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[0,12]}}",
      "{\"x\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[0,0]},\"y\":{\"data_offsets\":[0,12],"
      "\"dtype\":\"I16\",\"shape\":[6,1]}}"};
  return kSeeds;
}

TEST_F(ToolsFiles, FuzzedNpyHeaders) {
  fuzz(npy_seeds(), 200000, [](const std::string& bytes) {
    const auto header = parse_npy_header(bytes, bytes.size());
    EXPECT_TRUE(!header.ok() || header->data_offset + header->data_bytes == bytes.size());
    return header.status();
  });
}

TEST_F(ToolsFiles, FuzzedSafetensorsHeaders) {
  fuzz(safetensors_headers(), 200000, [](const std::string& json) {
    const auto entries = parse_safetensors_header(json, 12);
    uint64_t reached = 0;
    if (entries.ok()) {
      for (const SafetensorsEntry& entry : *entries) {
        EXPECT_EQ(entry.begin, reached);
        EXPECT_LE(entry.end, 12u);
        reached = entry.end;
      }
      EXPECT_EQ(reached, 12u);
    }
    return entries.status();
  });
}

TEST_F(ToolsFiles, FuzzedNpyFiles) {
  fuzz(npy_seeds(), 300, [&](const std::string& bytes) {
    const auto array = read_npy(write("fuzz.npy", bytes));
    if (array.ok()) sum_of(array->tensor);
    return array.status();
  });
}

TEST_F(ToolsFiles, FuzzedSafetensorsFiles) {
  std::vector<std::string> seeds;
  for (const std::string& header : safetensors_headers()) seeds.push_back(safetensors(header, std::string(12, '\1')));
  fuzz(seeds, 300, [&](const std::string& bytes) -> Status {
    const auto file = SafetensorsFile::open(write("fuzz.safetensors", bytes));
    if (!file.ok()) return file.status();
    for (const SafetensorsEntry& entry : file->entries()) {
      const auto array = file->read(entry.name);
      if (array.ok()) sum_of(array->tensor);
    }
    return {};
  });
}

}  // namespace
}  // namespace polyhead::tools
