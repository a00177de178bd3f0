import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryOneTime;

/** Holds a lock of Curator's: CuratorLock HOSTS, then lines `mutex|read|write acquire|try PATH` and `release`. */
public final class CuratorLock {
    public static void main(String[] args) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(args[0], 10_000, 10_000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        InterProcessLock lock = null;
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            if (words[0].equals("release")) {
                lock.release();
                System.out.println("released");
                continue;
            }
            lock = named(client, words[0], words[2]);
            boolean held = true;
            if (words[1].equals("acquire")) {
                lock.acquire();
            } else {
                held = lock.acquire(0, TimeUnit.MILLISECONDS);
            }
            System.out.println(held ? "held" : "taken");
        }
        client.close();
    }

    private static InterProcessLock named(CuratorFramework client, String kind, String path) {
        switch (kind) {
            case "read":
                return new InterProcessReadWriteLock(client, path).readLock();
            case "write":
                return new InterProcessReadWriteLock(client, path).writeLock();
            default:
                return new InterProcessMutex(client, path);
        }
    }
}
