//! A transaction log, as if a directory had seen years of use.

use std::{fs, io, path::Path};

const ANYONE: &[u8] = b"anyone";
const ALL: i32 = 31;
const CREATE: i32 = 1;

/// Writes into the server's empty data directory the log of a directory `path`, one level below the root, whose next
/// sequential node is numbered `next`.
pub(super) fn write(data: &Path, path: &str, next: i32) -> io::Result<()> {
    let mut log = Vec::new();
    log.extend(b"ZKLG");
    log.extend(2_i32.to_be_bytes()); // version
    log.extend(0_i64.to_be_bytes()); // database
    log.extend(transaction(1, path, 1));
    // The child goes again, which leaves the parent's count as it is.
    log.extend(transaction(2, &format!("{path}/used"), next));
    log.extend(deletion(3, &format!("{path}/used")));
    log.extend([0; 4_096]);
    let directory = data.join("version-2");
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("log.1"), log)
}

fn transaction(id: i64, path: &str, parents_count: i32) -> Vec<u8> {
    let mut body = header(id, CREATE);
    body.extend(text(path.as_bytes()));
    body.extend(0_i32.to_be_bytes()); // no data
    body.extend(1_i32.to_be_bytes()); // one access rule
    body.extend(ALL.to_be_bytes());
    body.extend(text(b"world"));
    body.extend(text(ANYONE));
    body.push(0); // not ephemeral
    body.extend(parents_count.to_be_bytes());
    framed(&body)
}

fn deletion(id: i64, path: &str) -> Vec<u8> {
    const DELETE: i32 = 2;

    let mut body = header(id, DELETE);
    body.extend(text(path.as_bytes()));
    framed(&body)
}

fn header(id: i64, kind: i32) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(0x1000_i64.to_be_bytes()); // session
    header.extend(i32::try_from(id).unwrap_or(0).to_be_bytes()); // number of the request
    header.extend(id.to_be_bytes());
    header.extend((1_700_000_000_000 + id).to_be_bytes()); // time
    header.extend(kind.to_be_bytes());
    header
}

fn text(bytes: &[u8]) -> Vec<u8> {
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    let mut text = length.to_be_bytes().to_vec();
    text.extend(bytes);
    text
}

fn framed(body: &[u8]) -> Vec<u8> {
    let mut frame = i64::from(adler32(body)).to_be_bytes().to_vec();
    frame.extend(text(body));
    frame.push(b'B');
    frame
}

fn adler32(bytes: &[u8]) -> u32 {
    const MODULUS: u32 = 65_521;

    let (low, high) = bytes.iter().fold((1, 0), |(low, high), byte| {
        let low = (low + u32::from(*byte)) % MODULUS;
        (low, (high + low) % MODULUS)
    });
    high << 16 | low
}
