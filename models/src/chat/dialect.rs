//! What Hugging Face's dialect of Jinja has beyond the engine's own.
//!
//! Not there: `%` as the formatting operator of strings (the `format` filter and method are), `tojson` with
//! `ensure_ascii` or `separators`, and the codes of `strftime` that depend on a locale.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use thiserror::Error;

/// What a template said with `raise_exception`.
#[derive(Debug, Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_filter("tojson", to_json);
    // As in Python, a string and a map have a length and elements too.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`: no escaping for HTML.
fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    if ascii {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: ensure_ascii=True is not implemented",
        ));
    }
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut value = serde_json::to_value(value).map_err(failed)?;
    if sorted {
        value.sort_all_objects();
    }
    let text = match indent {
        None => write_json(&value, Spaced),
        Some(n) => write_json(
            &value,
            PrettyFormatter::with_indent(" ".repeat(n.min(64)).as_bytes()),
        ),
    };
    text.map(Value::from).map_err(failed)
}

fn write_json(value: &serde_json::Value, formatter: impl Formatter) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Python's separators: a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(b": ")
    }
}

/// The template with `{% generation %}` and `{% endgeneration %}` (marks for training, which render as what they
/// enclose) turned into a block that the engine knows.
pub(super) fn plain_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let plain = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&inside.replacen(word, plain, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// The function `strftime_now(format)` for a moment, in UTC.
pub(super) fn strftime_now(now: Option<SystemTime>) -> Value {
    let now = now.unwrap_or_else(SystemTime::now);
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Value::from_function(move |format: String| strftime(&format, seconds))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The codes of Python's `strftime` that name a date or a time of day, for seconds since 1970.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let (year, month, day, day_of_year) = civil(days);
    let month_name = MONTHS[month];
    let day_name = DAYS[usize::try_from(days % 7).expect("below 7")];
    let hour_12 = if hour.is_multiple_of(12) { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = chars.next();
        }
        let (number, width) = match code {
            Some('Y') => (year, 4),
            Some('y') => (year % 100, 2),
            Some('m') => (month as u64 + 1, 2),
            Some('d') => (day, 2),
            Some('j') => (day_of_year, 3),
            Some('H') => (hour, 2),
            Some('I') => (hour_12, 2),
            Some('M') => (minute, 2),
            Some('S') => (second, 2),
            other => {
                out.push_str(match other {
                    Some('B') => month_name,
                    Some('b' | 'h') => &month_name[..3],
                    Some('A') => day_name,
                    Some('a') => &day_name[..3],
                    Some('p') if hour < 12 => "AM",
                    Some('p') => "PM",
                    Some('Z') => "UTC",
                    Some('%') => "%",
                    _ => {
                        let problem = format!("strftime_now: {format:?} has a code that is not implemented");
                        return Err(Error::new(ErrorKind::InvalidOperation, problem));
                    }
                });
                continue;
            }
        };
        let width = if unpadded { 0 } else { width };
        out.push_str(&format!("{number:0width$}"));
    }
    Ok(out)
}

/// Year, month from 0, day from 1 and day of the year from 1 of a day counted from 1970-01-01.
fn civil(mut days: u64) -> (u64, usize, u64, u64) {
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    // 400 years have 146097 days, always.
    let mut year = 1970 + 400 * (days / 146_097);
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01 Thursday 001 12:00:00 AM"),
            (951_782_399, "2000-02-28 Monday 059 11:59:59 PM"),
            (951_782_400, "2000-02-29 Tuesday 060 12:00:00 AM"),
            (1_735_646_400, "2024-12-31 Tuesday 366 12:00:00 PM"),
            (4_107_542_400, "2100-03-01 Monday 060 12:00:00 AM"),
        ] {
            assert_eq!(
                strftime("%Y-%m-%d %A %j %I:%M:%S %p", seconds).expect("known codes"),
                text
            );
        }
        assert_eq!(
            strftime("%-d %b %y, 100%%", 86_400 * 8).expect("known codes"),
            "9 Jan 70, 100%"
        );
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("100%", 0).is_err());
    }

    #[test]
    fn generation_marks_keep_their_whitespace_control() {
        let source =
            "{%- generation -%}a{% endgeneration +%}{% if generation %}{{ '{% generation' }}{% endif %}";
        let plain = "{%- if true -%}a{% endif +%}{% if generation %}{{ '{% generation' }}{% endif %}";
        assert_eq!(plain_blocks(source), plain);
    }
}
