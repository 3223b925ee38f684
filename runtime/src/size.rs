//! Numbers of bytes as people write them.

/// Units and their bytes, longest name first among those with the same ending.
const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

/// The bytes of `6GiB`, `1.5 GB` or `800MiB`; a fraction of a byte is dropped. Upper and lower case are the same.
///
/// # Errors
/// What is wrong with `text`, and what would be right.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let Some((number, unit)) = UNITS
        .iter()
        .find_map(|(name, bytes)| Some((lower.strip_suffix(name)?.trim_end(), u128::from(*bytes))))
    else {
        return Err(if lower.ends_with(|c: char| c.is_ascii_digit()) {
            "has no unit: write GiB, MiB, KiB, GB, MB, KB or B after the number".into()
        } else {
            "is no size such as 6GiB, 512MiB or 1.5GB".into()
        });
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || number.ends_with('.') {
        return Err("is no size such as 6GiB, 512MiB or 1.5GB".into());
    }
    // Twelve decimals tell bytes of a TiB apart; u128 holds any 64-bit number of units with them.
    let decimals = 10u128.pow(12);
    let padded = format!("{fraction:0<12}");
    let total = whole
        .parse::<u64>()
        .ok()
        .zip(padded[..12].parse::<u128>().ok())
        .and_then(|(whole, fraction)| {
            let scaled = u128::from(whole).checked_mul(decimals)?.checked_add(fraction)?;
            u64::try_from(scaled.checked_mul(unit)? / decimals).ok()
        });
    match total {
        None => Err("is more than any machine has".into()),
        Some(0) => Err("is nothing at all".into()),
        Some(bytes) => Ok(bytes),
    }
}

/// `n` bytes in words: 512 B, 1.50 KiB, 2.25 GiB.
#[must_use]
pub fn bytes(n: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut value = n as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match unit {
        "B" => format!("{n} B"),
        _ if value < 10.0 => format!("{value:.2} {unit}"),
        _ => format!("{value:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        for (text, want) in [
            ("6GiB", 6 << 30),
            ("512MiB", 512 << 20),
            ("1.5GB", 1_500_000_000),
            ("1.5 gib", 3 << 29),
            ("7kb", 7000),
            ("7KiB", 7168),
            ("0.000000001GB", 1),
            ("12B", 12),
            (" 2TiB ", 2 << 40),
            ("16777215.9999TiB", 18_446_744_073_599_600_453),
            ("0.0000000000009TiB", 0),
        ] {
            match want {
                0 => assert!(parse_bytes(text).is_err(), "{text}"),
                _ => assert_eq!(parse_bytes(text), Ok(want), "{text}"),
            }
        }
    }

    #[test]
    fn what_is_no_size_is_refused_and_says_why() {
        for (text, why) in [
            ("6", "no unit"),
            ("6000000000", "no unit"),
            ("6G", "such as"),
            ("", "such as"),
            ("GiB", "such as"),
            (".5GiB", "such as"),
            ("5.GiB", "such as"),
            ("-1GiB", "such as"),
            ("+1GiB", "such as"),
            ("1e3MiB", "such as"),
            ("1,5GiB", "such as"),
            ("1.2.3GiB", "such as"),
            ("1GiBs", "such as"),
            ("½GiB", "such as"),
            ("0GiB", "nothing"),
            ("16777216TiB", "more than"),
            ("99999999999999999999GiB", "more than"),
        ] {
            let error = parse_bytes(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1536), bytes(20 << 30)],
            ["0 B", "1023 B", "1.50 KiB", "20.0 GiB"]
        );
    }
}
