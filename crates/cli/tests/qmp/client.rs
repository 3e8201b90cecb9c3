//! A client that measures how long the disk keeps it waiting.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A client of an export without a name, as simple as one can be.
pub struct Client(UnixStream);

impl Client {
    pub fn connect(path: &Path) -> Client {
        let mut stream = UnixStream::connect(path).expect("a server");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        // No zeroes after the answer to the name of the export, which is empty.
        stream.write_all(&3_u32.to_be_bytes()).expect("flags");
        stream
            .write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")
            .expect("an option");
        stream.read_exact(&mut [0; 10]).expect("an export");
        Client(stream)
    }

    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0, 0, 1]);
        request.extend(7_u64.to_be_bytes());
        request.extend(offset_bytes.to_be_bytes());
        request.extend((bytes.len() as u32).to_be_bytes());
        self.0.write_all(&request).expect("a request");
        self.0.write_all(bytes).expect("bytes");
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[4..8], [0; 4], "the write succeeds");
    }
}
