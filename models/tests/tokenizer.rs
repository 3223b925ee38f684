//! Tokenizers against recorded outputs of the Hugging Face library, and against the library itself for other kinds.

use std::path::Path;

use horizon_models::tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Value, json};

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if name.ends_with(".zst") {
        zstd::decode_all(&bytes[..]).expect("a zstd file")
    } else {
        bytes
    }
}

fn olmo() -> Tokenizer {
    Tokenizer::from_bytes(&fixture("tests/fixtures/tokenizer-olmo/tokenizer.json.zst")).expect("loads")
}

fn goldens() -> Value {
    serde_json::from_slice(&fixture(
        "tests/fixtures/tokenizer-olmo/tokenizer_goldens.json.zst",
    ))
    .expect("JSON")
}

fn ids(v: &Value) -> Vec<u32> {
    serde_json::from_value(v.clone()).expect("a list of ids")
}

#[test]
fn recorded_encodings_and_decodings() {
    let (tokenizer, goldens) = (olmo(), goldens());
    let cases = goldens["encode"].as_array().expect("cases");
    assert!(cases.len() >= 40);
    for case in cases {
        let (text, want) = (case["text"].as_str().expect("text"), ids(&case["ids"]));
        for add_special in [false, true] {
            assert_eq!(
                tokenizer.encode(text, add_special).expect("encodes"),
                want,
                "{text:?}"
            );
        }
        assert_eq!(
            tokenizer.decode(&want, false).expect("decodes"),
            case["decoded"],
            "{text:?}"
        );
        assert_eq!(
            tokenizer.decode(&want, true).expect("decodes"),
            case["decoded_skip_special"],
            "{text:?}"
        );
    }
    assert_eq!(tokenizer.vocab_size(), goldens["info"]["vocab_size"]);
    for added in goldens["info"]["added_tokens"].as_array().expect("added tokens") {
        let id = u32::try_from(added["id"].as_u64().expect("id")).expect("small");
        assert_eq!(added["special"], tokenizer.is_special(id), "{added}");
        assert_eq!(
            tokenizer.token_bytes(id),
            added["content"].as_str().expect("content").as_bytes()
        );
    }
}

#[test]
fn recorded_streams() {
    let (tokenizer, goldens) = (olmo(), goldens());
    let cases = goldens["decode"].as_array().expect("cases");
    assert!(cases.len() >= 20);
    for case in cases {
        let ids = ids(&case["ids"]);
        let mut stream = tokenizer.stream(false);
        for (i, id) in ids.iter().enumerate() {
            let bytes: String = tokenizer
                .token_bytes(*id)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            assert_eq!(bytes, case["bytes_hex"][i], "bytes of {id}");
            assert_eq!(
                stream.push(*id).expect("decodes"),
                case["stream_pieces"][i],
                "piece {i} of {ids:?}"
            );
        }
        assert_eq!(stream.finish(), case["stream_flush"], "end of {ids:?}");
        assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), case["decoded"]);
    }
}

#[test]
fn ids_beyond_the_vocabulary_are_silent() {
    let tokenizer = olmo();
    assert_eq!(
        tokenizer
            .decode(&[12092, 50280, 50303, u32::MAX, 12092], false)
            .expect("decodes"),
        "HelloHello"
    );
    assert_eq!(tokenizer.token_bytes(50280), b"");
    assert!(!tokenizer.is_special(u32::MAX));
    assert_eq!(tokenizer.token_to_id("<|endoftext|>"), Some(50279));
    assert_eq!(tokenizer.token_to_id("no such token"), None);
}

#[test]
fn demo_tokenizer_agrees_with_the_recorded_prompts() {
    let tokenizer =
        Tokenizer::from_bytes(&fixture("assets/stories-olmoe/tokenizer.json.zst")).expect("loads");
    for model in ["stories-olmoe", "stories-qwen2moe"] {
        let golden: Value =
            serde_json::from_slice(&fixture(&format!("assets/{model}/golden.json"))).expect("JSON");
        let prompts = golden["prompts"].as_array().expect("prompts");
        assert!(!prompts.is_empty());
        for prompt in prompts {
            let text = prompt["text"].as_str().expect("text");
            assert_eq!(
                tokenizer.encode(text, false).expect("encodes"),
                ids(&prompt["ids"]),
                "{text:?}"
            );
            let greedy = tokenizer
                .decode(&ids(&prompt["greedy_ids"]), false)
                .expect("decodes");
            assert_eq!(greedy, prompt["greedy_text"]);
        }
    }
}

/// A sentencepiece-style tokenizer as Mixtral has it, with a post-processor that puts `<s>` in front.
fn sentencepiece(decoder: &Value) -> Vec<u8> {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2});
    for byte in 0..256 {
        vocab[format!("<0x{byte:02X}>")] = json!(byte + 3);
    }
    for (i, piece) in ["▁", "a", "b", "é", "▁a", "ab", "▁ab", "▁▁"].iter().enumerate() {
        vocab[piece] = json!(300 + i);
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": (0..3).map(|id| json!({
            "id": id, "content": (["<unk>", "<s>", "</s>"][id]), "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})).collect::<Vec<_>>(),
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                  "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "▁"]]},
    });
    serde_json::to_vec(&tokenizer).expect("serializes")
}

fn mixtral_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

#[test]
fn sentencepiece_style() {
    let tokenizer = Tokenizer::from_bytes(&sentencepiece(&mixtral_decoder())).expect("loads");
    // Neither the truncation to two tokens nor the padding to 64 of the file applies.
    let encoded = tokenizer.encode("ab a\n😀", true).expect("encodes");
    assert_eq!(
        encoded,
        [1, 306, 304, 3 + 10, 3 + 0xf0, 3 + 0x9f, 3 + 0x98, 3 + 0x80]
    );
    assert_eq!(tokenizer.encode("ab</s>", false).expect("encodes"), [306, 2]);
    assert_eq!(tokenizer.token_bytes(13), b"\n");
    assert_eq!(tokenizer.token_bytes(306), b" ab");
    assert_eq!(tokenizer.token_bytes(2), b"</s>");

    let mut stream = tokenizer.stream(true);
    let pieces: Vec<String> = encoded
        .iter()
        .map(|id| stream.push(*id).expect("decodes"))
        .collect();
    assert_eq!(pieces, ["", "ab", " a", "\n", "", "", "", "😀"]);
    assert_eq!(stream.finish(), "");
    // What continues a text keeps its space; special tokens are spelled out unless skipped.
    assert_eq!(tokenizer.continuation(true).push(306).expect("decodes"), " ab");
    assert_eq!(
        tokenizer.decode(&[1, 306, 2], false).expect("decodes"),
        "<s> ab</s>"
    );
    // An invalid byte is U+FFFD at once, an unfinished character only at the end.
    let mut stream = tokenizer.stream(false);
    let pieces: Vec<String> = [3 + 0xff, 301, 3 + 0xe2, 301, 3 + 0xe2]
        .map(|id| stream.push(id).expect("decodes"))
        .into();
    assert_eq!(pieces, ["\u{fffd}", "a", "", "\u{fffd}a", ""]);
    assert_eq!(stream.finish(), "\u{fffd}");
}

/// Added tokens stand for their spelling, also where it looks like the byte alphabet; so does what is outside of it.
#[test]
fn added_tokens_of_a_byte_level_tokenizer() {
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": false})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added(3, "é"), added(4, "Ġ✓ ")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": {"Ã©": 0, "Ġa": 1, "▁b c": 2}, "merges": []},
    });
    let tokenizer = Tokenizer::from_bytes(tokenizer.to_string().as_bytes()).expect("loads");
    let text = tokenizer.decode(&[0, 1, 2, 3, 4], true).expect("decodes");
    assert_eq!(text, "é a▁b céĠ✓ ");
}

/// For every kind of decoder, pieces put together are what the library decodes from the whole.
#[test]
fn streams_agree_with_the_library() {
    let decoders = [
        mixtral_decoder(),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}),
        json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]}),
        json!({"type": "WordPiece", "prefix": "a", "cleanup": false}),
        json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁",
               "prepend_scheme": "never", "split": true}]}),
        Value::Null,
    ];
    for decoder in decoders {
        let bytes = sentencepiece(&decoder);
        let ours = Tokenizer::from_bytes(&bytes).expect("loads");
        let library = tokenizers::Tokenizer::from_bytes(&bytes).expect("loads");
        let mut state = 7u32;
        for round in 0..200 {
            let sequence: Vec<u32> = (0..12)
                .flat_map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Words, special tokens and one whole character in bytes; never a lone invalid byte.
                    match state >> 24 {
                        n @ 0..=239 => vec![300 + n % 8],
                        240..=247 => vec![1 + (state >> 8) % 2],
                        _ => vec![3 + 0xc3, 3 + 0xa9],
                    }
                })
                .collect();
            for skip in [false, true] {
                let mut stream = ours.stream(skip);
                let mut text: String = sequence
                    .iter()
                    .map(|id| stream.push(*id).expect("decodes"))
                    .collect();
                text.push_str(&stream.finish());
                let whole = library.decode(&sequence, skip).expect("decodes");
                assert_eq!(text, whole, "{decoder}, round {round}, skip {skip}, {sequence:?}");
            }
        }
    }
}

#[test]
fn bad_files_are_named_errors() {
    let good = sentencepiece(&mixtral_decoder());
    assert_eq!(
        Tokenizer::from_bytes(b"").expect_err("empty"),
        TokenizerError::Empty
    );
    for cut in [1, good.len() / 2, good.len() - 1] {
        assert!(
            matches!(Tokenizer::from_bytes(&good[..cut]), Err(TokenizerError::Json(_))),
            "cut at {cut}"
        );
    }
    assert!(matches!(
        Tokenizer::from_bytes(b"\x0a\x0e\x0a\x05<unk>"),
        Err(TokenizerError::Json(_))
    ));
    for other in [
        &b"{}"[..],
        b"[]",
        b"null",
        b"7",
        br#"{"model": null}"#,
        br#"{"model": {"type": "BPE"}}"#,
    ] {
        let error = Tokenizer::from_bytes(other).expect_err("no tokenizer");
        assert!(matches!(error, TokenizerError::Invalid(_)), "{error}");
    }
    let edits: [(&str, &str); 4] = [
        (
            r#""decoder":{"type":"Sequence""#,
            r#""decoder":{"type":"Unknown""#,
        ),
        (r#""▁ab":306"#, r#""▁ab":4000000000"#),
        (r#"["▁","▁"]"#, r#"["▁","missing"]"#),
        (r#""id":2,"content":"</s>""#, r#""id":-2,"content":"</s>""#),
    ];
    for (from, to) in edits {
        let text = String::from_utf8(good.clone()).expect("UTF-8");
        assert!(text.contains(from), "{from}");
        let error = Tokenizer::from_bytes(text.replace(from, to).as_bytes()).expect_err(to);
        assert!(
            matches!(
                error,
                TokenizerError::Invalid(_) | TokenizerError::IdOutOfRange(4_000_000_000)
            ),
            "{error}"
        );
        assert!(error.to_string().starts_with("tokenizer.json: "), "{error}");
    }
}
