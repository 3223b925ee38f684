//! JSON for people and for diffs: outer levels one item a line, inner levels on one line.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Objects and arrays nested at least this deep stand on one line.
const INLINE_FROM: usize = 5;

/// `value` as JSON with a line break at the end.
///
/// # Errors
/// When `value` has a map key that is not a string.
pub fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut out = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut out, Layout::default()))?;
    out.push(b'\n');
    Ok(out)
}

#[derive(Default)]
struct Layout {
    depth: usize,
    empty: bool,
}

impl Layout {
    fn open<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        w.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.empty = false;
        if !first {
            w.write_all(b",")?;
        }
        if self.depth < INLINE_FROM {
            self.line(w)
        } else if first {
            Ok(())
        } else {
            w.write_all(b" ")
        }
    }

    fn close<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        let broken = self.depth < INLINE_FROM && !self.empty;
        self.depth -= 1;
        self.empty = false;
        if broken {
            self.line(w)?;
        }
        w.write_all(bracket)
    }

    fn line<W: ?Sized + Write>(&self, w: &mut W) -> io::Result<()> {
        w.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| w.write_all(b"  "))
    }
}

impl Formatter for Layout {
    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn outer_levels_are_broken_and_inner_ones_are_not() {
        let v = serde_json::json!({"a": [], "b": {"c": [[[1, 2], {}]]}});
        let text = String::from_utf8(super::to_bytes(&v).expect("plain data")).expect("UTF-8");
        let expected = "{\n  \"a\": [],\n  \"b\": {\n    \"c\": [\n      [\n        [1, 2],\n        {}\n      ]\n    ]\n  }\n}\n";
        assert_eq!(text, expected);
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).expect("valid"),
            v
        );
    }
}
