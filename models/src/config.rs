//! `config.json` as found: typed access to its fields, with an error that names the field.
//!
//! A key that is absent and a key that is `null` mean the same unless a method says otherwise. Values keep their
//! type: `"8"` and `8.0` are not accepted where a whole number is meant.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use horizon_core::spec::{MAX_DIMENSION, SpecError};
use serde_json::{Map, Value};
use thiserror::Error;

/// Why a `config.json` cannot be run.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Not JSON.
    #[error("config.json: not valid JSON: {0}")]
    Json(String),
    /// JSON, but not an object.
    #[error("config.json: must be a JSON object, found {0}")]
    NotAnObject(&'static str),
    /// No `model_type`, or one that no family here implements.
    #[error("config.json: model_type = {found}: not supported; supported are {}", supported.join(", "))]
    UnknownFamily {
        /// What the file says.
        found: String,
        /// Every `model_type` that can be run.
        supported: Vec<&'static str>,
    },
    /// A field without which the model's shape is unknown.
    #[error("config.json: {field} is missing")]
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A value of the wrong type or range, or one that asks for something that is not implemented.
    #[error("config.json: {field} = {value}: {problem}")]
    Invalid {
        /// Name of the field, with dots where it is nested.
        field: String,
        /// What the file says, shortened.
        value: String,
        /// What is wrong, and what is supported.
        problem: String,
    },
    /// Every field is readable, but together they describe no model that can be run.
    #[error("config.json: {0}")]
    Spec(#[from] SpecError),
}

/// Parses the bytes of a `config.json`.
///
/// # Errors
/// When they are not JSON.
pub fn parse(bytes: &[u8]) -> Result<Value, ConfigError> {
    serde_json::from_slice(bytes).map_err(|e| ConfigError::Json(e.to_string()))
}

/// The fields of a `config.json`, or of an object nested in it. Remembers which have been asked for.
#[derive(Clone, Debug)]
pub struct Config<'a> {
    fields: &'a Map<String, Value>,
    prefix: String,
    /// Full names, of nested fields too.
    asked: Rc<RefCell<BTreeSet<String>>>,
}

impl<'a> Config<'a> {
    /// The top level of a configuration.
    ///
    /// # Errors
    /// When it is not a JSON object.
    pub fn new(value: &'a Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(fields) => Ok(Self {
                fields,
                prefix: String::new(),
                asked: Rc::default(),
            }),
            other => Err(ConfigError::NotAnObject(kind(other))),
        }
    }

    /// The value of a field; `None` when it is absent or `null`.
    #[must_use]
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.know(field);
        self.fields.get(field).filter(|v| !v.is_null())
    }

    /// Whether the key exists, if only as `null`.
    #[must_use]
    pub fn has(&self, field: &str) -> bool {
        self.know(field);
        self.fields.contains_key(field)
    }

    /// Counts a field as asked for, whose value does not matter here.
    pub fn know(&self, field: &str) {
        self.asked.borrow_mut().insert(format!("{}{field}", self.prefix));
    }

    /// Fields that nobody has asked for and that say something: neither `null` nor `false`. Of a nested object those
    /// within it, if it has been asked for.
    #[must_use]
    pub fn unasked(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (name, value) in self.fields {
            let full = format!("{}{name}", self.prefix);
            let asked = self.asked.borrow().contains(&full);
            match value {
                Value::Null | Value::Bool(false) => {}
                Value::Object(fields) if asked => {
                    let nested = Self {
                        fields,
                        prefix: format!("{full}."),
                        asked: Rc::clone(&self.asked),
                    };
                    found.extend(nested.unasked());
                }
                _ if asked => {}
                _ => found.push(full),
            }
        }
        found
    }

    /// A nested object.
    ///
    /// # Errors
    /// When it is neither absent nor an object.
    pub fn object(&self, field: &str) -> Result<Option<Self>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Self {
                fields,
                prefix: format!("{}{field}.", self.prefix),
                asked: Rc::clone(&self.asked),
            })),
            Some(other) => Err(self.invalid(field, other, "must be an object")),
        }
    }

    /// A size or count.
    ///
    /// # Errors
    /// When it is missing, or not a whole number from 0 to [`MAX_DIMENSION`].
    pub fn size(&self, field: &'static str) -> Result<usize, ConfigError> {
        self.optional_size(field)?.ok_or(ConfigError::Missing { field })
    }

    /// A size or count that may be absent.
    ///
    /// # Errors
    /// When it is not a whole number from 0 to [`MAX_DIMENSION`].
    pub fn optional_size(&self, field: &str) -> Result<Option<usize>, ConfigError> {
        self.get(field).map(|v| self.whole(field, v)).transpose()
    }

    /// A finite number, or `default` when absent.
    ///
    /// # Errors
    /// When it is not a number.
    pub fn float_or(&self, field: &str, default: f64) -> Result<f64, ConfigError> {
        Ok(self.optional_float(field)?.unwrap_or(default))
    }

    /// A number that may be absent.
    ///
    /// # Errors
    /// When it is not a number.
    pub fn optional_float(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        self.get(field)
            .map(|v| {
                v.as_f64()
                    .ok_or_else(|| self.invalid(field, v, "must be a number"))
            })
            .transpose()
    }

    /// `true` or `false`, or `default` when absent.
    ///
    /// # Errors
    /// When it is something else.
    pub fn bool_or(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        self.get(field).map_or(Ok(default), |v| {
            v.as_bool()
                .ok_or_else(|| self.invalid(field, v, "must be true or false"))
        })
    }

    /// A text that may be absent.
    ///
    /// # Errors
    /// When it is not a string.
    pub fn optional_str(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        self.get(field)
            .map(|v| {
                v.as_str()
                    .ok_or_else(|| self.invalid(field, v, "must be a string"))
            })
            .transpose()
    }

    /// A list of whole numbers; empty when absent.
    ///
    /// # Errors
    /// When it is not a list, or an entry is not a whole number from 0 to [`MAX_DIMENSION`].
    pub fn sizes(&self, field: &str) -> Result<Vec<usize>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(Vec::new());
        };
        let list = value
            .as_array()
            .ok_or_else(|| self.invalid(field, value, "must be a list of whole numbers"))?;
        list.iter().map(|v| self.whole(field, v)).collect()
    }

    /// A list of strings; `None` when absent.
    ///
    /// # Errors
    /// When it is not a list of strings.
    pub fn optional_strs(&self, field: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect())
            .map(Some)
            .ok_or_else(|| self.invalid(field, value, "must be a list of strings"))
    }

    /// The error for a field whose value cannot be used.
    #[must_use]
    pub fn invalid(&self, field: &str, value: &Value, problem: impl Into<String>) -> ConfigError {
        const SHOWN: usize = 80;
        let mut text = value.to_string();
        if text.chars().count() > SHOWN {
            text = text.chars().take(SHOWN).chain(['…']).collect();
        }
        ConfigError::Invalid {
            field: format!("{}{field}", self.prefix),
            value: text,
            problem: problem.into(),
        }
    }

    fn whole(&self, field: &str, value: &Value) -> Result<usize, ConfigError> {
        value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n <= MAX_DIMENSION)
            .ok_or_else(|| {
                self.invalid(
                    field,
                    value,
                    format!("must be a whole number from 0 to {MAX_DIMENSION}"),
                )
            })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
