// Transcribe with the functions that `python -m mlx_medusa.export --format mlxfn` wrote: MLX for C++ and nothing else.
// The same as mlxfn_transcribe.py. Prints the tokens of each file; tokenizer.json in the folder turns them into text.
//
//   MLX=$(python -c "import mlx.core, os; print(os.path.dirname(mlx.core.__file__))")
//   g++ -std=c++20 -O2 examples/mlxfn_transcribe.cpp -I $MLX/include -L $MLX/lib -lmlx -Wl,-rpath,$MLX/lib
//   ./a.out FOLDER file.wav ...               (on Linux, to be fast: LD_PRELOAD=libopenblas.so.0 ./a.out ...)
//
// The audio is 16 kHz mono in 16 bits, at most 30 s; the model knows English only and has heads.

#include <mlx/mlx.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// The numbers behind a key of export.json: one, or those of a list. An app has a JSON library for this.
std::vector<int> numbers(const std::string& json, const std::string& key) {
  size_t at = json.find("\"" + key + "\": ");
  if (at == std::string::npos) throw std::runtime_error("export.json: no " + key);
  at += key.size() + 4;
  size_t end = json[at] == '[' ? json.find(']', at) : json.find_first_of(",}", at);
  std::vector<int> found;
  while (at < end) {
    if (std::isdigit(static_cast<unsigned char>(json[at]))) {
      size_t digits = 0;
      found.push_back(std::stoi(json.substr(at), &digits));
      at += digits;
    } else {
      ++at;
    }
  }
  return found;
}

int number(const std::string& json, const std::string& key) { return numbers(json, key).at(0); }

// The samples of a PCM file, in a window filled up with zeros.
mx::array window(const std::string& path, int size) {
  std::string bytes = read(path);
  // a canonical header: RIFF, 12 bytes on the format (PCM, 1 channel, 16000 Hz), 16 bits, then the data
  const unsigned char format[] = {1, 0, 1, 0, 0x80, 0x3e, 0, 0};
  size_t at = bytes.find("data", 36);
  if (bytes.compare(0, 4, "RIFF") || at == std::string::npos || std::memcmp(&bytes[20], format, 8) || bytes[34] != 16)
    throw std::runtime_error(path + ": not a wav file of 16 kHz, mono, 16 bits");
  if (bytes.size() - at - 8 > 2 * static_cast<size_t>(size)) throw std::runtime_error(path + ": longer than 30 s");
  std::vector<float> samples(size, 0.0f);
  for (size_t i = 0, from = at + 8; i < samples.size() && from + 2 <= bytes.size(); ++i, from += 2) {
    int16_t sample;
    std::memcpy(&sample, &bytes[from], 2);
    samples[i] = sample / 32768.0f;
  }
  return mx::array(samples.data(), {size});
}

mx::array ids(const std::vector<int>& values, const mx::Shape& shape) {
  return mx::array(values.data(), shape, mx::int32);
}

std::vector<int> to_vector(mx::array values) {
  values = mx::contiguous(mx::astype(values, mx::int32));
  values.eval();
  return {values.data<int>(), values.data<int>() + values.size()};
}

mx::array ban(const std::vector<int>& tokens, int vocab_size) {
  std::vector<float> bias(vocab_size, 0.0f);
  for (int token : tokens) bias[token] = -std::numeric_limits<float>::infinity();
  return mx::array(bias.data(), {vocab_size});
}

Arrays joined(Arrays first, const Arrays& second, const Arrays& third = {}) {
  first.insert(first.end(), second.begin(), second.end());
  first.insert(first.end(), third.begin(), third.end());
  return first;
}

mx::array row(const mx::array& states, int at) {  // [1, W, D] -> [1, 1, D]
  return mx::contiguous(mx::slice(states, {0, at, 0}, {1, at + 1, states.shape(2)}));
}

struct Exported {
  std::string json;
  mx::ImportedFunction encoder, step, heads;
  mx::array never, never_first;
  Arrays empty;  // the cache before the first token
  int rounds = 0, decided = 0;

  explicit Exported(const std::string& folder)
      : json(read(folder + "/export.json")),
        encoder(mx::import_function(folder + "/encoder.mlxfn")),
        step(mx::import_function(folder + "/step.mlxfn")),
        heads(mx::import_function(folder + "/heads.mlxfn")),
        never(ban(numbers(json, "suppressed"), number(json, "vocab_size"))),
        never_first(ban(numbers(json, "suppressed_at_begin"), number(json, "vocab_size"))) {
    if (json.find("\"languages\": {}") == std::string::npos)
      throw std::runtime_error(folder + ": of many languages; its prompt also names the language and the task");
    for (size_t at = 0; (at = json.find("\"name\": \"past_", at)) != std::string::npos; ++at) {
      std::string port = json.substr(at, json.find('}', at) - at);
      mx::Dtype dtype = port.find("bfloat16") != std::string::npos  ? mx::bfloat16
                        : port.find("float16") != std::string::npos ? mx::float16
                                                                    : mx::float32;
      std::vector<int> shape = numbers(port, "shape");
      empty.push_back(mx::zeros(mx::Shape(shape.begin(), shape.end()), dtype));
    }
  }

  std::vector<int> pick(const mx::array& logits) const { return to_vector(mx::argmax(logits + never, -1)); }

  std::vector<int> transcribe(const mx::array& samples) {
    Arrays listened = encoder({samples});  // K and V: of the decoder's layers, then of the heads'
    Arrays memory(listened.begin(), listened.begin() + empty.size());
    Arrays heads_memory(listened.begin() + empty.size(), listened.end());
    std::vector<int> tokens = {number(json, "sot"), number(json, "no_timestamps")};
    const int begin = tokens.size(), eot = number(json, "eot");
    const int most = number(json, "max_tokens"), width = number(json, "width");

    Arrays out = step(joined({ids(tokens, {1, begin}), ids({0}, {1})}, empty, memory));
    mx::array last = mx::slice(out[0], {0, begin - 1, 0}, {1, begin, out[0].shape(2)});
    mx::array hidden = row(out[1], begin - 1);  // it predicted the last token, whose K and V are not cached yet
    tokens.push_back(pick(last + never_first)[0]);
    while (tokens.back() != eot) {
      int length = tokens.size(), room = begin + most - length;
      if (room < 1) break;
      std::vector<int> rows = {tokens.back()};
      if (width > 1) {
        std::vector<int> drafts = to_vector(heads(joined({hidden, ids(rows, {1})}, heads_memory))[0]);
        for (int i = 0; i < std::min(width, room) - 1; ++i) rows.push_back(drafts[i]);
      }
      Arrays cache(out.begin() + 2, out.end());  // a shorter length is all that it takes to rewind it
      const int count = rows.size();
      out = step(joined({ids(rows, {1, count}), ids({length - 1}, {1})}, cache, memory));
      std::vector<int> picks = pick(out[0]);
      size_t right = 0;  // drafts that are what the verifier itself picks
      while (right + 1 < rows.size() && picks[right] == rows[right + 1] && picks[right] != eot) ++right;
      hidden = row(out[1], right);
      tokens.insert(tokens.end(), picks.begin(), picks.begin() + right + 1);
      ++rounds;
      decided += right + 1;
    }
    if (tokens.back() == eot) tokens.pop_back();
    return {tokens.begin() + begin, tokens.end()};
  }
};

int main(int count, char** args) try {
  if (count < 3) throw std::runtime_error("usage: transcribe FOLDER file.wav ...");
  Exported exported(args[1]);
  for (int i = 2; i < count; ++i) {
    mx::array samples = window(args[i], number(exported.json, "window_samples"));
    for (int token : exported.transcribe(samples)) std::cout << token << " ";
    std::cout << std::endl;
  }
  std::cerr << exported.decided << " tokens in " << exported.rounds << " passes\n";
} catch (const std::exception& error) {
  std::cerr << "transcribe: error: " << error.what() << "\n";
  return 1;
}
