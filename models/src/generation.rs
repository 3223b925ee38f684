//! `generation_config.json`: how a model's makers want it sampled, and the ids that end its text.

use serde_json::{Map, Value};
use thiserror::Error;

const FILE: &str = "generation_config.json";

/// A value that cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GenerationError {
    /// Not a JSON object.
    #[error("{FILE}: not a JSON object: {0}")]
    Json(String),
    /// A field of the wrong type or range.
    #[error("{file}: {field} = {value}: must be {expected}")]
    Field {
        /// The file that has it.
        file: &'static str,
        /// Its name.
        field: &'static str,
        /// What the file says.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
}

/// Sampling defaults of a model; `None` where its makers say nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end a text. Empty: nothing but the limits ends it.
    pub eos: Vec<u32>,
    /// `false`: greedy, whatever else is set.
    pub do_sample: Option<bool>,
    /// Divides the logits; at least 0, where 0 means greedy.
    pub temperature: Option<f32>,
    /// Most tokens to choose among; 0 means no such limit.
    pub top_k: Option<usize>,
    /// The likeliest tokens up to this total probability, above 0 and at most 1.
    pub top_p: Option<f32>,
    /// Tokens of at least this share of the likeliest one's probability, from 0 to 1.
    pub min_p: Option<f32>,
    /// Divides the positive and multiplies the negative logits of tokens already there; above 0.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate, at least 1.
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// Reads `generation_config.json`, where there is one. The ids that end a text are its `eos_token_id` (one or
    /// several), else that of `config.json`, else the tokenizer's own `eos_token`.
    ///
    /// # Errors
    /// A file that is no JSON object, or a field of the wrong type or range.
    pub fn from_files(
        generation_config: Option<&[u8]>,
        config: &Value,
        tokenizer_eos: Option<u32>,
    ) -> Result<Self, GenerationError> {
        let fields: Map<String, Value> = match generation_config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(|e| GenerationError::Json(e.to_string()))?,
            None => Map::new(),
        };
        let mut eos = ids(FILE, &fields)?;
        if eos.is_empty()
            && let Some(config) = config.as_object()
        {
            eos = ids("config.json", config)?;
        }
        if eos.is_empty() {
            eos.extend(tokenizer_eos);
        }
        let number = |field, expected, sound: fn(f64) -> bool| {
            read(&fields, field, expected, |v| {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "FP32 is what the sampler works in"
                )]
                v.as_f64()
                    .filter(|x| x.is_finite() && sound(*x))
                    .map(|x| x as f32)
            })
        };
        let whole = |field, expected, least: u64| {
            read(&fields, field, expected, |v| {
                v.as_u64()
                    .filter(|n| *n >= least)
                    .and_then(|n| usize::try_from(n).ok())
            })
        };
        Ok(Self {
            eos,
            do_sample: read(&fields, "do_sample", "true or false", Value::as_bool)?,
            temperature: number("temperature", "a number, at least 0", |x| x >= 0.0)?,
            top_k: whole("top_k", "a whole number, at least 0", 0)?,
            top_p: number("top_p", "a number above 0, at most 1", |x| x > 0.0 && x <= 1.0)?,
            min_p: number("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number("repetition_penalty", "a number above 0", |x| x > 0.0)?,
            max_new_tokens: whole("max_new_tokens", "a whole number, at least 1", 1)?,
        })
    }
}

/// A field's value if it is there and not null.
fn read<T>(
    fields: &Map<String, Value>,
    field: &'static str,
    expected: &'static str,
    convert: impl FnOnce(&Value) -> Option<T>,
) -> Result<Option<T>, GenerationError> {
    let Some(value) = fields.get(field).filter(|v| !v.is_null()) else {
        return Ok(None);
    };
    match convert(value) {
        Some(converted) => Ok(Some(converted)),
        None => Err(GenerationError::Field {
            file: FILE,
            field,
            value: value.to_string(),
            expected,
        }),
    }
}

/// `eos_token_id`: absent, one id, or a list of ids.
fn ids(file: &'static str, fields: &Map<String, Value>) -> Result<Vec<u32>, GenerationError> {
    let value = match fields.get("eos_token_id") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(value) => value,
    };
    let list = value
        .as_array()
        .map_or(std::slice::from_ref(value), Vec::as_slice);
    let ids: Option<Vec<u32>> = list
        .iter()
        .map(|v| v.as_u64().and_then(|n| u32::try_from(n).ok()))
        .collect();
    let mut ids = ids.ok_or_else(|| GenerationError::Field {
        file,
        field: "eos_token_id",
        value: value.to_string(),
        expected: "a token id or a list of token ids",
    })?;
    let mut seen = Vec::new();
    ids.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(generation: Value, config: Value) -> Result<GenerationConfig, GenerationError> {
        GenerationConfig::from_files(Some(generation.to_string().as_bytes()), &config, Some(9))
    }

    #[test]
    fn ids_come_from_the_first_file_that_has_them() {
        let eos = |generation, config| read(generation, config).expect("sound").eos;
        assert_eq!(
            eos(json!({"eos_token_id": [7, 5, 7]}), json!({"eos_token_id": 1})),
            [7, 5]
        );
        assert_eq!(eos(json!({"eos_token_id": 0}), json!({"eos_token_id": 1})), [0]);
        assert_eq!(
            eos(json!({"eos_token_id": null}), json!({"eos_token_id": 1})),
            [1]
        );
        assert_eq!(
            eos(json!({"eos_token_id": []}), json!({"eos_token_id": [1, 2]})),
            [1, 2]
        );
        assert_eq!(eos(json!({}), json!({"eos_token_id": null})), [9]);
        assert_eq!(
            GenerationConfig::from_files(None, &json!({}), None),
            Ok(GenerationConfig::default())
        );
    }

    #[test]
    fn every_field_is_read() {
        let all = json!({
            "do_sample": true, "temperature": 0.5, "top_k": 0, "top_p": 1, "min_p": 0.25, "repetition_penalty": 1.5,
            "max_new_tokens": 3, "eos_token_id": 2, "pad_token_id": 1, "transformers_version": "5.17.0",
        });
        let want = GenerationConfig {
            eos: vec![2],
            do_sample: Some(true),
            temperature: Some(0.5),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
            max_new_tokens: Some(3),
        };
        assert_eq!(read(all, json!({})), Ok(want));
    }

    #[test]
    fn bad_values_name_file_and_field() {
        for (field, value) in [
            ("do_sample", json!(1)),
            ("temperature", json!(-0.1)),
            ("temperature", json!("0.7")),
            ("top_k", json!(-1)),
            ("top_k", json!(1.5)),
            ("top_p", json!(0)),
            ("top_p", json!(1.1)),
            ("min_p", json!(-0.1)),
            ("min_p", json!(2)),
            ("repetition_penalty", json!(0)),
            ("max_new_tokens", json!(0)),
            ("eos_token_id", json!("</s>")),
            ("eos_token_id", json!([1, -1])),
            ("eos_token_id", json!(5_000_000_000u64)),
        ] {
            let error = read(json!({field: value}), json!({}))
                .expect_err(field)
                .to_string();
            assert!(
                error.starts_with("generation_config.json: ") && error.contains(field),
                "{error}"
            );
        }
        let error = read(json!({}), json!({"eos_token_id": -1}))
            .expect_err("negative")
            .to_string();
        assert!(error.starts_with("config.json: eos_token_id"), "{error}");
        let cut = GenerationConfig::from_files(Some(b"{"), &json!({}), None);
        assert!(matches!(cut, Err(GenerationError::Json(_))));
    }
}
